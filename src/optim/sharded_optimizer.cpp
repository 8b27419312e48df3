#include <ddpkit/optim/sharded_optimizer.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "optim/shards.h"
#include "parallel/join.h"
#include "parallel/model_agreement.h"

namespace ddpkit::optim {
namespace {

enum JoinEvent : int { kStep, kClip };

void check_owner(const Shards& shards) {
  const ShardOutput::State state = shards.state();
  if (state == ShardOutput::State::kReplaced)
    throw InvalidArgument(
        "another ShardedOptimizer has been made of the same DistributedDataParallel and receives its gradients now: "
        "step that one, and destroy this one");
  if (state == ShardOutput::State::kNoReducer)
    throw InvalidArgument(
        "the DistributedDataParallel of this ShardedOptimizer has been destroyed, or its module wrapped again: make a "
        "ShardedOptimizer of the new wrapper");
}

/// Collective.
void step_together(Shards& shards, double factor) {
  const at::NoGradGuard no_grad;
  shards.consolidated.reset();
  try {
    shards.follow_parameters();
    if (shards.update_in_backward) {
      if (shards.weights && shards.weights->is_written())
        throw InvalidArgument(
            "a parameter was written to between backward and step(): with update_in_backward its update is still in "
            "progress; write to it after step()");
    } else {
      factor = shards.follow_active_ranks({factor})[0];
      // After this line no rank reads the weights, and all ranks have the same weights.
      if (shards.weights) shards.weights->synchronize();
      if (shards.memory) shards.begin_update();
      shards.update(factor);
      shards.drop_gradients();
    }
  } catch (const std::exception& error) {
    shards.group.abort(error.what());
    if (shards.sharded) shards.sharded->abort(error.what());
    throw;
  }
  if (shards.weights || shards.memory) {
    shards.group.barrier();
    if (shards.memory) shards.commit();
  } else {
    shards.gather_weights();
  }
}

/// Collective. `arguments`: max_norm, norm_type, error_if_nonfinite.
double clip_together(Shards& shards, std::vector<double> arguments) {
  arguments = shards.follow_active_ranks(std::move(arguments));
  const double max_norm = arguments[0], norm_type = arguments[1];
  const double own = grad_norm(shards.pieces, norm_type);
  const bool largest = std::isinf(norm_type);
  const at::Tensor sum = at::full({1}, largest ? own : std::pow(own, norm_type),
                                  at::TensorOptions(at::kDouble).device(shards.group.device()));
  shards.group.all_reduce(sum, largest ? ReduceOp::kMax : ReduceOp::kSum);
  const double together = sum.item<double>();
  shards.group.check();
  const double norm = largest ? together : std::pow(together, 1 / norm_type);
  clip_grads_with_norm_(shards.pieces, max_norm, norm, arguments[2] != 0);
  return norm;
}

void notify(const Shards& shards, int event) {
  if (JoinContext* join = JoinContext::of(*shards.joinable)) return join->notify(*shards.joinable, event);
  if (JoinContext::running(shards.group))
    throw InvalidArgument(
        "a ShardedOptimizer calls collectives: pass it to join() with the DistributedDataParallel, "
        "join({ddp, optimizer}, loop)");
}

}  // namespace

std::vector<at::Tensor> ShardedOptimizerBase::parameters_of(const DistributedDataParallelBase& ddp) {
  std::vector<at::Tensor> tensors;
  for (const NamedParameter& parameter : ddpkit::parameters_of(ddp.reducer())) tensors.push_back(parameter.tensor);
  return tensors;
}

ShardedOptimizerBase::ShardedOptimizerBase(DistributedDataParallelBase& ddp, const Groups& groups,
                                           std::unique_ptr<torch::optim::OptimizerOptions> defaults, Factory factory,
                                           const ShardedOptions& options)
    : ShardedOptimizerBase(std::make_shared<Shards>(ddp.reducer(), shard_group_of(ddp.reducer()), groups,
                                                    std::move(defaults), std::move(factory), options.shared_weights,
                                                    options.update_in_backward)) {
  ShardOutput::attach(shards_, ddp.reducer());
}

ShardedOptimizerBase::ShardedOptimizerBase(std::shared_ptr<Shards> shards)
    : torch::optim::Optimizer(shards->groups, std::move(shards->defaults)), shards_(std::move(shards)) {
  shards_->owner = this;
  shards_->joinable = this;
}

ShardedOptimizerBase::~ShardedOptimizerBase() = default;

// A context of join() stays with the object that was passed to join().
ShardedOptimizerBase::ShardedOptimizerBase(ShardedOptimizerBase&& other) noexcept
    : torch::optim::Optimizer(std::move(other)), shards_(std::move(other.shards_)) {
  shards_->owner = this;
  shards_->joinable = this;
}

ShardedOptimizerBase& ShardedOptimizerBase::operator=(ShardedOptimizerBase&& other) noexcept {
  torch::optim::Optimizer::operator=(std::move(other));
  shards_ = std::move(other.shards_);
  shards_->owner = this;
  shards_->joinable = this;
  return *this;
}

bool ShardedOptimizerBase::has_shared_weights() const noexcept { return shards_->weights != nullptr; }

at::Tensor ShardedOptimizerBase::step(LossClosure closure) {
  if (closure)
    throw InvalidArgument("ShardedOptimizer takes no closure: call loss.backward() first and step() after it");
  step_scaled(1);
  return {};
}

void ShardedOptimizerBase::step_scaled(double factor) {
  if (shards_->update_in_backward && factor != 1)
    throw InvalidArgument(
        "gradients cannot be scaled after backward: with update_in_backward, backward has already applied them; make "
        "the ShardedOptimizer without it");
  check_owner(*shards_);
  notify(*shards_, kStep);
  step_together(*shards_, factor);
}

void ShardedOptimizerBase::zero_grad(bool set_to_none) {
  // torch::optim's zero_grad() detaches gradients in place, but the gradient of a piece may be a view.
  const at::NoGradGuard no_grad;
  if (set_to_none) {
    shards_->drop_gradients();
  } else {
    for (at::Tensor& piece : shards_->pieces) {
      if (piece.grad().defined()) piece.mutable_grad().zero_();
    }
  }
  for (NamedParameter& parameter : shards_->parameters) parameter.tensor.mutable_grad().reset();
  shards_->dropped = true;
}

double ShardedOptimizerBase::clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite) {
  if (shards_->update_in_backward)
    throw InvalidArgument(
        "gradients cannot be clipped after backward: with update_in_backward, backward has already applied them; make "
        "the ShardedOptimizer without it");
  check_owner(*shards_);
  notify(*shards_, kClip);
  return clip_together(*shards_, {max_norm, norm_type, error_if_nonfinite ? 1.0 : 0.0});
}

// ---- state

void ShardedOptimizerBase::consolidate_state(int to) const {
  Shards& shards = *shards_;
  const at::NoGradGuard no_grad;
  shards.consolidated.reset();
  std::unique_ptr<FusedOptimizer> whole;
  check_same_on_all_ranks(shards.group, "consolidate_state", [&] {
    if (to < 0 || to >= shards.group.world_size())
      throw InvalidArgument(fmt::format("consolidate_state to rank {} of {}", to, shards.group.world_size()));
    shards.check_groups();
    if (shards.group.rank() == to) whole = shards.make_whole();
    return fmt::format("to rank {}", to);
  });
  shards.gather_state(whole.get(), to);
  shards.consolidated = std::move(whole);
}

const FusedOptimizer& ShardedOptimizerBase::consolidated() const {
  const Shards& shards = *shards_;
  if (!shards.consolidated)
    throw InvalidArgument(fmt::format(
        "rank {} has only its part of the optimizer's state: call consolidate_state() on all ranks first, and save on "
        "the rank it names",
        shards.group.rank()));
  return *shards.consolidated;
}

void ShardedOptimizerBase::save(torch::serialize::OutputArchive& archive) const { consolidated().save(archive); }

void ShardedOptimizerBase::load(torch::serialize::InputArchive& archive) {
  const auto whole = shards_->make_whole();
  whole->load(archive);
  shards_->take_state(*whole);
}

// ---- join

const ProcessGroup& ShardedOptimizerBase::join_group() const { return shards_->group; }

void ShardedOptimizerBase::join_shadow(int event) {
  if (event == kClip) {
    clip_together(*shards_, {0, 2, 0});
  } else {
    step_together(*shards_, 1);
  }
}

void ShardedOptimizerBase::join_end(int source) {
  if (source < 0) return;
  const ProcessGroup& group = shards_->group;
  const std::string bytes = group.all_gather_bytes(shards_->settings({}))[static_cast<std::size_t>(source)];
  if (group.rank() != source) shards_->take_settings(bytes);
}

}  // namespace ddpkit::optim
