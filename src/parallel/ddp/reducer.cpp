#include "parallel/ddp/reducer_impl.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "parallel/autograd/graph.h"
#include "parallel/model_agreement.h"

namespace ddpkit {

namespace {

/// Moves frozen parameters to `frozen`. Of the others dense ones come first.
std::vector<NamedParameter> take_trained(std::vector<NamedParameter> all, std::vector<NamedParameter>& frozen) {
  const auto end = std::stable_partition(all.begin(), all.end(),
                                         [](const auto& parameter) { return parameter.tensor.requires_grad(); });
  frozen.assign(end, all.end());
  all.erase(end, all.end());
  std::stable_partition(all.begin(), all.end(), [](const auto& parameter) { return !parameter.sparse; });
  return all;
}

UnusedPolicy unused_policy(const ReducerOptions& options) {
  if (options.static_graph) return UnusedPolicy::kStaticGraph;
  return options.find_unused_parameters ? UnusedPolicy::kFind : UnusedPolicy::kError;
}

}  // namespace

Reducer::Impl::Impl(std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options)
    : group_(std::move(group)),
      options_(options),
      parameters_(take_trained(std::move(parameters), frozen_)),
      used_(parameters_, group_, unused_policy(options)),
      bucket_of_(parameters_.size()),
      last_readers_(group_.device()),
      seen_(group_.device()) {
  const auto is_dense = [](const NamedParameter& parameter) { return !parameter.sparse; };
  dense_ = static_cast<std::size_t>(std::count_if(parameters_.begin(), parameters_.end(), is_dense));
  note_agreement();
  lay_out();
}

Reducer::Impl::~Impl() {
  try {
    if (memory_) memory_->keep_alive_for(seen_);
  } catch (...) {
    // The device is gone, and its memory with it.
  }
}

void Reducer::Impl::set_comm_hook(CommHook hook) {
  const std::lock_guard lock(mutex_);
  end_abandoned_backward();
  if (in_backward_) throw InvalidArgument("a communication hook cannot be set while backward runs");
  run_on_all_ranks(group_, "set_comm_hook", [&] {
    if (hook && sink_)
      throw InvalidArgument(
          "gradients are sharded: a communication hook, which reduces whole ones, cannot go with that");
    return std::string();
  });
  const bool same_memory = static_cast<bool>(comm_hook_) == static_cast<bool>(hook);
  comm_hook_ = std::move(hook);
  if (same_memory) return;
  lay_out();
  arrivals_.clear();
  rebuilds = 0;
}

void Reducer::Impl::set_gradient_sink(GradientSink& sink) {
  const std::lock_guard lock(mutex_);
  end_abandoned_backward();
  if (in_backward_) throw InvalidArgument("the gradients' sink cannot be set while backward runs");
  run_on_all_ranks(group_, "set_gradient_sink", [&] {
    if (comm_hook_)
      throw InvalidArgument("a communication hook reduces whole gradients: it cannot go with sharded ones");
    if (dense_ < parameters_.size())
      throw InvalidArgument(
          fmt::format("the gradient of {} is sparse: it cannot be sharded", parameters_[dense_].name));
    for (const NamedParameter& parameter : parameters_) {
      if (!parameter.tensor.is_non_overlapping_and_dense())
        throw InvalidArgument(fmt::format(
            "parameter {} is not dense in memory: it cannot be sharded (make it contiguous)", parameter.name));
    }
    return std::string();
  });
  follow_strides();
  sink_ = &sink;
  hooks_->set_sharded(true);
  follow_sink();
}

/// In destructors, which must not communicate: follow_sink() does the rest.
void Reducer::Impl::remove_gradient_sink(const GradientSink& sink) noexcept {
  const std::lock_guard lock(mutex_);
  if (sink_ != &sink) return;
  sink_ = nullptr;
  hooks_->set_sharded(false);
}

Reducer::SinkRegistration::State Reducer::Impl::state_of(const GradientSink& sink) const {
  const std::lock_guard lock(mutex_);
  using State = SinkRegistration::State;
  if (hooks_->replaced()) return State::kNoReducer;
  return sink_ == &sink ? State::kActive : State::kReplaced;
}

/// Lays the gradients out for the sink that is set, or for none. Collective.
void Reducer::Impl::follow_sink() {
  if (memory_->sharded() == (sink_ != nullptr)) return;
  memory_->set_sharded(sink_ != nullptr);
  std::vector<std::size_t> order;  // As it is.
  for (const auto& members : plan) order.insert(order.end(), members.begin(), members.end());
  std::reverse(order.begin(), order.end());
  make_plan(order);
}

void Reducer::Impl::install_hooks() {
  std::vector<at::Tensor> leaves;
  for (const NamedParameter& parameter : parameters_) leaves.push_back(parameter.tensor);
  // The graph may outlive the reducer.
  hooks_.emplace(
      std::move(leaves),
      [weak = weak_from_this()](std::size_t index, const at::Tensor& added) {
        if (const auto self = weak.lock()) self->on_gradient(index, added);
      },
      GradientHooks::Kind::kExclusive);
  tracker_.emplace(weak_from_this(), mutex_, *hooks_, [this] { end_backward(); });
}

void Reducer::Impl::follow_parameters() {
  if (hooks_->replaced())
    throw InvalidArgument(
        "a newer DistributedDataParallel wraps parameters of this one: use the newer one, or wrap the module again");
  check_agreement();
  {
    const std::lock_guard lock(mutex_);
    if (in_hook_) throw InvalidArgument("a communication hook cannot call forward");
    end_abandoned_backward();
    if (!in_backward_) follow_sink();
    if (!in_backward_ && synchronize && at::GradMode::is_enabled()) used_.count_forward();
  }
  if (sink_ && !in_backward_) sink_->follow_parameters();
  const std::lock_guard lock(mutex_);
  hooks_->refresh();
}

void Reducer::Impl::remove_hooks() noexcept {
  const std::lock_guard lock(mutex_);
  hooks_->remove();
}

void Reducer::Impl::expect_gradients_of(const std::vector<at::Tensor>& outputs) {
  const std::lock_guard lock(mutex_);
  const auto is_trained = [](const NamedParameter& parameter) { return parameter.tensor.requires_grad(); };
  const bool hidden = !used_.find(outputs, *hooks_) && std::any_of(parameters_.begin(), parameters_.end(), is_trained);
  if (hidden) {
    tracker_->at_outputs(outputs, /*leaves_too=*/true, [this] { enter_at_output(); });
  } else {
    tracker_->at_outputs(outputs, /*leaves_too=*/false, [this] { tracker_->note_output_reached(); });
  }
}

Reducer::Reducer(std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options)
    : impl_(std::make_shared<Impl>(std::move(parameters), std::move(group), options)) {
  impl_->install_hooks();
}

Reducer::~Reducer() { impl_->remove_hooks(); }

void Reducer::follow_parameters() { impl_->follow_parameters(); }

void Reducer::set_synchronize(bool synchronize) noexcept { impl_->synchronize = synchronize; }

bool Reducer::synchronize() const noexcept { return impl_->synchronize; }

void Reducer::set_comm_hook(CommHook hook) { impl_->set_comm_hook(std::move(hook)); }

std::unique_ptr<Reducer::SinkRegistration> Reducer::set_gradient_sink(GradientSink& sink) {
  impl_->set_gradient_sink(sink);
  return std::make_unique<SinkRegistration>(impl_, sink);
}

Reducer::SinkRegistration::~SinkRegistration() {
  if (const auto reducer = reducer_.lock()) reducer->remove_gradient_sink(*sink_);
}

Reducer::SinkRegistration::State Reducer::SinkRegistration::state() const {
  const auto reducer = reducer_.lock();
  return reducer ? reducer->state_of(*sink_) : State::kNoReducer;
}

std::vector<NamedParameter> Reducer::parameters() const { return impl_->parameters(); }

void Reducer::expect_gradients_of(const std::vector<at::Tensor>& outputs) { impl_->expect_gradients_of(outputs); }

void Reducer::set_timeline(std::optional<Timeline> timeline, std::uint64_t write_after) {
  impl_->set_timeline(std::move(timeline), write_after);
}

void Reducer::note_outputs(const std::vector<at::Tensor>& outputs) { impl_->note_outputs(outputs); }

DistributedDataParallelStats Reducer::stats() const { return impl_->stats(); }

void Reducer::set_join(JoinSession* session, int index) { impl_->set_join(session, index); }

void Reducer::shadow_bucket() { impl_->shadow_bucket(); }

void Reducer::shadow_end_of_backward() { impl_->shadow_end_of_backward(); }

const std::vector<std::vector<std::size_t>>& Reducer::buckets() const noexcept { return impl_->plan; }

const std::optional<BackwardTrace>& Reducer::last_backward() const noexcept { return impl_->trace; }

std::uint64_t Reducer::backwards() const noexcept { return impl_->backwards; }

int Reducer::rebuilds() const noexcept { return impl_->rebuilds; }

std::optional<ArenaStats> Reducer::arena() const { return impl_->arena(); }

}  // namespace ddpkit
