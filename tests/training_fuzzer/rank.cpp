#include "rank.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <ddpkit/optim/join_state.h>
#include <ddpkit/optim/precision.h>
#include <ddpkit/parallel/comm_hooks.h>
#include <ddpkit/parallel/join.h>
#include <ddpkit/parallel/power_sgd.h>

namespace ddpkit::fuzz {
namespace {

/// Joins the `world` batches of one process.
Batch joined_batch(const Case& drawn, int number) {
  std::vector<Batch> parts;
  for (int rank = 0; rank < drawn.world; ++rank) parts.push_back(make_batch(drawn, number, rank));
  const auto all = [&](at::Tensor Batch::*member) {
    std::vector<at::Tensor> tensors;
    for (const Batch& part : parts) tensors.push_back(part.*member);
    return torch::cat(tensors);
  };
  return {all(&Batch::x), all(&Batch::index), all(&Batch::mask), all(&Batch::coefficients), number, 0};
}

}  // namespace

RankTraining::RankTraining(const Case& drawn, int rank, ProcessGroup group, std::string folder)
    : drawn_(drawn), rank_(rank), group_(std::move(group)), folder_(std::move(folder)), hook_(drawn.wrapper.hook) {}

void RankTraining::start() {
  const bool alone = drawn_.wrapper.kind == "data_parallel";
  model_ = std::make_shared<Model>(drawn_, rank_, alone ? std::nullopt : std::optional(group_), false);
  if (alone) {
    data_parallel_ = std::make_unique<DataParallel<Model>>(
        model_, DataParallelOptions{.replicas = drawn_.world,
                                    .bucket_cap_mb = drawn_.wrapper.bucket_cap_mb,
                                    .broadcast_buffers = drawn_.wrapper.broadcast_buffers,
                                    .arena = drawn_.wrapper.arena});
  } else {
    wrap();
  }
  make_optimizer();
  if (drawn_.optimizer.scaler) scaler_.emplace(group_, optim::GradScalerOptions{.init_scale = kLossScale});
}

void RankTraining::wrap() {
  const Wrapper& wrapper = drawn_.wrapper;
  if (is_fully_sharded(drawn_)) {
    ddp_ = fully_sharded();
    return;
  }
  DistributedDataParallelOptions options;
  options.bucket_cap_mb = options.first_bucket_cap_mb = wrapper.bucket_cap_mb;
  options.broadcast_buffers = wrapper.broadcast_buffers;
  options.find_unused_parameters = wrapper.find_unused;
  options.static_graph = wrapper.static_graph;
  options.gradient_as_bucket_view = wrapper.view;
  options.parameters_to_ignore = model_->ignored_names();
  options.arena = wrapper.arena;
  options.arena_mb = 4;
  ddp_ = std::make_unique<Wrapped>(model_, group_, options);
  set_hook(hook_);
}

std::unique_ptr<DistributedDataParallelBase> RankTraining::fully_sharded() {
  const Wrapper& wrapper = drawn_.wrapper;
  FullyShardedOptions options{.min_unit_mb = wrapper.min_unit_mb,
                              .reshard_after_forward = wrapper.reshard,
                              .find_unused_parameters = wrapper.find_unused,
                              .broadcast_buffers = wrapper.broadcast_buffers};
  const auto children = model_->named_children();
  for (std::size_t i = 0; i < children.size() && !wrapper.units.empty(); ++i)
    if (wrapper.units == "each" || i % 2 == 0) options.units.push_back(children[i].key());
  return std::make_unique<FullySharded>(model_, group_, options);
}

std::optional<RankTraining::FullySharded::Gathering> RankTraining::scope(bool whole) const {
  if (!is_fully_sharded(drawn_)) return std::nullopt;
  auto& fsdp = static_cast<FullySharded&>(*ddp_);
  return whole || drawn_.wrapper.scope == "whole" ? fsdp.whole() : fsdp.gathering();
}

void RankTraining::set_hook(const std::string& name) {
  hook_ = name;
  if (name == "none_again") ddp_->register_comm_hook({});
  CommHook hook;
  if (name == "all_reduce") hook = comm_hooks::all_reduce(group_);
  if (name == "fp16") hook = comm_hooks::fp16_compress(group_);
  if (name == "bf16") hook = comm_hooks::bf16_compress(group_);
  if (name == "power_sgd")
    hook = comm_hooks::PowerSGD(
        group_, {.matrix_approximation_rank = 8, .start_powerSGD_iter = 1, .min_compression_rate = 1e-6});
  if (name == "own" || name == "stats")
    hook = [this, asks = name == "stats"](GradBucket& bucket) {
      if (asks) (void)ddp_->stats();
      const torch::NoGradGuard no_grad;
      bucket.buffer.div_(group_.world_size());
      return BucketReduction{.work = group_.all_reduce_async(bucket.buffer)};
    };
  if (!hook) return;
  ddp_->register_comm_hook([this, hook](GradBucket& bucket) {
    const bool is_asked = bucket.is_last || hook_throws_ == "hook";
    const std::string throws = is_asked ? std::exchange(hook_throws_, "") : "";
    if (throws == "hook" || throws == "hook_last") throw Model::Thrown();
    BucketReduction pending = hook(bucket);
    if (throws == "hook_finish") pending.finish = []() -> at::Tensor { throw Model::Thrown(); };
    return pending;
  });
}

void RankTraining::make_optimizer() {
  optimizer_ = fuzz::make_optimizer(drawn_.optimizer, optimizer_parameters(*model_, true), ddp_.get());
  make_scheduler();
}

void RankTraining::make_scheduler() {
  if (!drawn_.optimizer.schedule) return;
  scheduler_ = std::make_unique<optim::LearningRateScheduler>(*optimizer_.base, optim::Schedule(&schedule_factor));
  if (steps_ > 0) scheduler_->set_step(steps_);
}

at::Tensor RankTraining::output_of(const Batch& batch) {
  if (data_parallel_) return data_parallel_->forward(batch);
  if (is_fully_sharded(drawn_)) return output_of(static_cast<FullySharded&>(*ddp_), batch);
  return output_of(static_cast<Wrapped&>(*ddp_), batch);
}

template <class Wrapper>
at::Tensor RankTraining::output_of(Wrapper& wrapper, const Batch& batch) {
  const std::string& output = drawn_.wrapper.output;
  if (output == "tuple") return std::get<1>(wrapper.forward(batch, AsTuple()))[0];
  if (output == "map") return wrapper.forward(batch, AsMap()).at("output");
  if (output == "opaque") return wrapper.forward(batch, AsOpaque()).value;
  return wrapper.forward(batch);
}

at::Tensor RankTraining::forward(const Event& event) {
  Batch batch = data_parallel_ ? joined_batch(drawn_, batch_) : make_batch(drawn_, batch_, rank_);
  ++batch_;
  if (data_parallel_) {
    for (int rank = 0; rank < drawn_.world; ++rank)
      if (poisons(event, rank)) batch.x.narrow(0, rank * drawn_.rows, drawn_.rows).mul_(INFINITY);
  } else if (poisons(event, rank_)) {
    batch.x = batch.x * INFINITY;
  }
  model_->train(event.how != "eval");
  std::optional<Reducer::NoSync> guard;
  if (is_local(event) && ddp_) guard.emplace(ddp_->no_sync());
  if (event.how == "nested_no_sync" && ddp_) {
    const auto inner = ddp_->no_sync();
  }
  std::optional<optim::Autocast> autocast;
  if (!drawn_.autocast.empty())
    autocast.emplace(at::kCPU, type_named(drawn_.autocast), optim::AutocastOptions{.cache = !data_parallel_});
  const at::Tensor output = output_of(batch);
  model_->train();
  return loss_of(drawn_, output, batch);
}

void RankTraining::backward(const Event& event) {
  at::Tensor loss;
  for (const int slot : event.slots) {
    if (const auto found = graphs_.find(slot); found != graphs_.end())
      loss = loss.defined() ? loss + found->second : found->second;
  }
  if (!loss.defined() || !loss.requires_grad()) return;
  std::optional<Reducer::NoSync> guard;
  if (is_local(event) && ddp_) guard.emplace(ddp_->no_sync());
  if (event.how == "nested_no_sync" && ddp_) {
    const auto inner = ddp_->no_sync();
  }
  has_gradients_ = !is_local(event);
  (scaler_ ? scaler_->scale(loss) : loss).backward({}, event.how == "retain");
}

void RankTraining::zero(const std::string& how) {
  // The scaler expects step() after unscale_().
  if (unscaled_ && scaler_) scaler_->update(scaler_->get_scale());
  unscaled_ = has_gradients_ = false;
  if (how == "hold") model_->hold_gradients();
  if (how == "module") return model_->zero_grad();
  if (how == "base") return optimizer_.base->zero_grad();
  if (optimizer_.fused) return optimizer_.fused->zero_grad();
  if (optimizer_.sharded) return optimizer_.sharded->zero_grad();
  optimizer_.base->zero_grad();
}

void RankTraining::clip(const Event& event) {
  if (!has_gradients_) return;
  const double type = event.node == 0 ? INFINITY : event.node;
  if (scaler_ && !unscaled_) scaler_->unscale_(*optimizer_.base);
  unscaled_ = true;
  norm_ = optimizer_.fused     ? optimizer_.fused->clip_grad_norm(event.value, type)
          : optimizer_.sharded ? optimizer_.sharded->clip_grad_norm(event.value, type)
                               : optim::clip_grad_norm_(model_->parameters(), event.value, type);
  report_tensor(report, event_, Kind::kWeight, "norm", at::scalar_tensor(norm_, at::kDouble));
}

void RankTraining::step() {
  bool done = true;
  if (scaler_) {
    done = scaler_->step(*optimizer_.base);
    scaler_->update();
  } else {
    optimizer_.base->step();
  }
  unscaled_ = false;
  if (!done) return;
  if (optimizer_.sharded) has_gradients_ = false;  // step() has consumed the gradients.
  ++steps_;
  if (scheduler_) scheduler_->step();
}

void RankTraining::join(const Event& event) {
  const int before = batch_;
  const auto loop = [&] {
    for (int k = 0; k < event.counts.at(static_cast<std::size_t>(rank_)); ++k) {
      zero("");
      graphs_[0] = forward({});
      backward({});
      graphs_.erase(0);
      step();
    }
  };
  const JoinOptions options{.divide_by_initial_world_size = event.how != "active"};
  if (optimizer_.sharded) {
    ddpkit::join({*ddp_, *optimizer_.sharded}, loop, options);
  } else {
    optim::JoinState state(*ddp_, *optimizer_.base);
    ddpkit::join({*ddp_, state}, loop, options);
  }
  const int most = *std::max_element(event.counts.begin(), event.counts.end());
  batch_ = before + most;
  steps_ += most - event.counts[static_cast<std::size_t>(rank_)];
  if (scheduler_) scheduler_->set_step(steps_);
  zero("");
}

void RankTraining::throw_within(const Event& event) {
  if (event.rank < 0 || event.rank == rank_) {
    if (event.how == "forward")
      model_->throw_next_in_forward();
    else if (throws_in_hook(event))
      hook_throws_ = event.how;
    else
      model_->throw_next_in_backward(static_cast<std::size_t>(event.node));
  }
  try {
    if (const at::Tensor loss = forward(event); loss.requires_grad()) loss.backward();
    if (!hook_throws_.empty()) throw Model::Thrown();  // No hook ran.
  } catch (const Model::Thrown&) {
    if (ends_program(event)) throw;
  }
  model_->train();
  zero("");
}

void RankTraining::perform(std::uint32_t number, const Event& event) {
  event_ = number;
  if (replaces(event)) graphs_.clear();
  if (changes_model(event)) {
    // Only whole parameters have a pointer. A write on one rank alone must not gather.
    const auto within = scope(event.how == "pointer" || event.kind == "set_layout" || event.kind == "cast");
    change_model(*model_, event, rank_);
    graphs_.clear();
  } else if (event.kind == "zero") {
    zero(event.how);
  } else if (event.kind == "forward") {
    graphs_[event.slots.at(0)] = forward(event);
  } else if (event.kind == "backward") {
    backward(event);
    return report_all(reports_gradients(drawn_, event), is_local(event) ? Kind::kLocal : Kind::kGradient);
  } else if (event.kind == "clip") {
    clip(event);
  } else if (event.kind == "step") {
    if (wants_step(drawn_, event, has_gradients_, norm_)) step();
  } else if (event.kind == "join") {
    join(event);
  } else if (event.kind == "throw") {
    throw_within(event);
  } else if (event.kind == "hook") {
    set_hook(event.how);
  } else if (event.kind == "wrap_again") {
    wrap_again(event.how);
  } else if (event.kind == "optimizer_again") {
    optimizer_again(event.how);
  } else if (event.kind == "save_load") {
    save_load(event.how);
  } else if (event.kind == "add_group") {
    add_group();
  }
  report_all(false, Kind::kLocal);
}

void RankTraining::report_all(bool gradients, Kind gradient) {
  if (hides_weights(drawn_, drawn_.events[event_])) {
    report_model(report, event_, *model_, gradients, gradient);
  } else {
    const auto within = scope(false);
    report_model(report, event_, *model_, gradients, gradient);
  }
  if (drawn_.events[event_].kind != "step") return;
  if (!optimizer_.sharded) return report_state(report, event_, *optimizer_.base, *model_);
  for (int rank = 0; rank < drawn_.world; ++rank) {  // consolidate: one rank at a time has the complete state.
    optimizer_.sharded->consolidate_state(rank);
    if (rank == rank_) report_state(report, event_, optimizer_.sharded->consolidated(), *model_);
  }
}

}  // namespace ddpkit::fuzz
