#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/ScopeExit.h>

#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/trace/event_ring.h"
#include "parallel/ddp/comm_hooks.h"
#include "parallel/ddp/debug.h"
#include "parallel/ddp/reducer.h"
#include "parallel/ddp/sparse_gradient.h"
#include "parallel/join.h"
#include "parallel/model_agreement.h"
#include "parallel/sharding/parameter_shards.h"

namespace ddpkit {
namespace {

/// A sharding backward waits while more bytes than this are being reduced in place. This limits the memory of gradients
/// if one rank runs ahead of another.
constexpr std::size_t kShardedBytesUnderWay = std::size_t{2} << 20;

}  // namespace

// ---- begin and end

/// Called before a gradient counts, or at an output of a forward pass that may use no parameter.
void Reducer::Impl::enter_backward() {
  end_abandoned_backward();
  if (backward_.phase == Phase::kIdle) {
    follow_shard_output();
    begin(Phase::kReducing);
    used_.begin_backward();
    for (std::size_t i = 0; i < dense_.size(); ++i) backward_.buckets[*bucket_of_[i]].pending += used_.expects(i);
  }
  tracker_->enter();
}

void Reducer::Impl::begin(Phase phase) {
  backward_.phase = phase;
  backward_.buckets.reserve(plan.size());
  for (std::size_t b = 0; b < plan.size(); ++b) {
    BucketState& bucket = backward_.buckets.emplace_back(group_.device());
    bucket.bytes = bucket_bytes_[b];
    bucket.parameters = plan[b].size();
  }
}

/// Called at an output of a forward pass whose graph shows no parameter: the other ranks wait for this rank.
void Reducer::Impl::enter_at_output() {
  if (!synchronize || backward_.phase == Phase::kInCommHook || !hooks_->may_run()) return;
  enter_backward();
  tracker_->note_output_reached();
}

void Reducer::Impl::end_backward() {
  if (backward_.phase == Phase::kIdle || backward_.phase == Phase::kInCommHook) return;
  try {
    if (tracker_->continues_outside()) return;
    finish_backward();
  } catch (...) {
    abort_group("at its end");
    rethrow_with_advice();
  }
}

Backward Reducer::Impl::leave_backward() noexcept {
  used_.reset();
  tracker_->reset();
  return std::exchange(backward_, {});
}

/// Drops all work of the backward after an error.
void Reducer::Impl::reset() noexcept {
  leave_backward();
  storage_->reset();
  arrival_order_.clear();  // The order is incomplete. The next backward records it again.
}

/// Call in a catch block. Notifies the other ranks, which would otherwise wait for this rank in a later bucket or
/// collective. Has no effect if the error came from other ranks, because the group has already ended.
void Reducer::Impl::abort_group(const std::string& where) noexcept {
  reset();
  const auto abort = [this](const std::string& reason) {
    group_.abort(reason);
    if (parameter_shards_) parameter_shards_->abort(reason);
  };
  try {
    try {
      throw;
    } catch (const std::exception& error) {
      abort(fmt::format("backward on rank {} failed {}: {}", group_.rank(), where, error.what()));
    }
  } catch (...) {
    abort("backward failed");
  }
}

// ---- gradients and bucket starts

void Reducer::Impl::on_gradient(std::size_t index, const at::Tensor& added) {
  const std::lock_guard lock(mutex_);
  const NamedParameter& parameter = parameters_[index];
  // The gradient is undefined if a node returned none, for example a checkpoint that detaches its input.
  if (added.defined()) used_.mark_used(index);
  if (!synchronize) return;
  if (backward_.phase == Phase::kInCommHook) {  // The backward that called the hook keeps its state.
    const auto text =
        fmt::format("a communication hook cannot run a backward that gives a gradient to {}", parameter.name);
    group_.abort(text);
    throw InvalidArgument(text);
  }
  try {
    if (at::GradMode::is_enabled())
      throw InvalidArgument(fmt::format(
          "backward(create_graph=true) through DistributedDataParallel: the gradient of {} would lose its history when "
          "it is averaged; use torch::autograd::grad(..., create_graph=true) for the inner derivative",
          parameter.name));
    enter_backward();
    if (!added.defined()) return;
    const std::optional<std::size_t> b = bucket_of_[index];
    used_.add(index, b);
    if (b && *b < backward_.started) used_.throw_late(index, *b);
    const Clock::time_point now = backward_.last_gradient = Clock::now();
    if (backward_.first_gradient == Clock::time_point{}) backward_.first_gradient = now;
    note_arrival(index);
    const at::Tensor& gradient = parameter.tensor.grad();
    if (debug_level() >= DebugLevel::kDetail) warn_unless_finite(parameter.name, gradient, group_, stats_.backwards());
    if (!b) return;
    if (gradient.defined() && gradient.layout() != at::kStrided)
      throw InvalidArgument(
          fmt::format("the gradient of {} is sparse, but its module is no torch::nn::Embedding or EmbeddingBag made "
                      "with sparse(true), by which DistributedDataParallel knows beforehand",
                      parameter.name));
    BucketState& bucket = backward_.buckets[*b];
    note_writer(bucket);
    bucket.ready = now;
    if (!used_.is_ready(index)) return;  // Autograd may still add to the gradient.
    storage_->add(index, added);
    if (storage_->sharded() && !storage_->in_place() && !seen_.has_streams()) drop_gradient(index);  // It was copied.
    if (used_.expects(index)) --bucket.pending;
    note_finished();
    start_complete_buckets();
  } catch (...) {
    abort_group("at the gradient of " + parameter.name);
    rethrow_with_advice();
  }
}

/// Call before queuing work on a bucket's memory on the current stream.
void Reducer::Impl::note_writer(BucketState& bucket) {
  if (!bucket.writers.add_current()) return;
  seen_.add_current();
  // Copies to the bucket wait until the last backward's gradients are copied from the bucket.
  last_readers_.current_waits();
}

void Reducer::Impl::start_complete_buckets() {
  while (backward_.started < plan.size() && backward_.buckets[backward_.started].pending == 0)
    start_bucket(backward_.started++);
  if (storage_->sharded()) deliver_early();
}

void Reducer::Impl::start_bucket(std::size_t b) {
  BucketState& bucket = backward_.buckets[b];
  note_writer(bucket);
  // Gradients of one bucket may be on several streams. The current stream waits for them, and the reduction waits for
  // the current stream.
  bucket.writers.current_waits();
  bucket.stream = bucket.writers.current();
  for (const std::size_t index : plan[b]) {
    if (used_.arrivals(index) == 0) {
      storage_->add_unused(index);
    } else if (used_.learns_graph()) {
      storage_->add(index, {});
    }
  }
  bucket.started = Clock::now();
  if (bucket.ready == Clock::time_point{}) bucket.ready = bucket.started;  // No gradient was used.
  notify(kJoinBucket);
  bucket.sent_bytes = group_.world_size() > 1 ? bucket.bytes : 0;
  storage_->flush_copies_in(b);
  if (const auto output = shard_output_.lock(); output && b == 0) output->before_first();
  EventRing::of_process().set_bucket(b);
  if (comm_hook_) {
    call_comm_hook(b);
  } else {
    bucket.work = storage_->reduce(b);
  }
}

void Reducer::Impl::call_comm_hook(std::size_t b) {
  GradBucket shown;
  shown.index = b;
  shown.is_last = b + 1 == plan.size();
  shown.buffer = storage_->flat(b);
  for (const std::size_t index : plan[b]) {
    shown.gradients.push_back(storage_->bucket_view(index));
    shown.parameters.push_back(parameters_[index].tensor);
    shown.names.push_back(parameters_[index].name);
  }
  BucketReduction pending;
  {
    const auto in_hook = enter_comm_hook();
    pending = call_hook(comm_hook_, std::move(shown), group_);
  }
  BucketState& bucket = backward_.buckets[b];
  if (group_.world_size() > 1) bucket.sent_bytes = pending.sent_bytes.value_or(storage_->flat(b).nbytes());
  bucket.work = std::move(pending.work);
  bucket.finish = std::move(pending.finish);
}

/// Buckets finish in the order in which they were started. The query also makes progress.
void Reducer::Impl::note_finished() {
  // The host runs ahead of a device, so the result would mean little, and a query is not allowed during stream capture.
  if (seen_.has_streams()) return;
  for (; backward_.finished < backward_.started; ++backward_.finished) {
    BucketState& bucket = backward_.buckets[backward_.finished];
    if (bucket.finish || !bucket.work.is_completed()) return;
    bucket.finished = Clock::now();
  }
}

/// Delivers reduced shards, and waits while too many bytes are being reduced. This cannot deadlock: all ranks reduce
/// buckets in the same order.
void Reducer::Impl::deliver_early() {
  note_finished();
  while (backward_.taken < backward_.finished) take_bucket();
  // On a device, the stream waits, not the host: for all reductions but the last one.
  while (seen_.has_streams() && backward_.taken + 1 < backward_.started) take_bucket();
  // With sharded parameters, a gather on another rank may come before the bucket that this rank would wait for. Then
  // finish_reductions() waits.
  if (storage_->in_place() && !parameter_shards_) {
    std::size_t under_way = 0;
    for (std::size_t b = backward_.taken; b < backward_.started; ++b) under_way += bucket_bytes_[b];
    while (under_way > kShardedBytesUnderWay) {
      under_way -= bucket_bytes_[backward_.taken];
      take_bucket();
    }
  }
  deliver_taken();
}

/// On a device, streams wait for reductions, not the host.
ParameterShards::Reductions Reducer::Impl::reductions() {
  if (seen_.has_streams()) return {};
  const auto started = [this] {
    const std::lock_guard lock(mutex_);
    return reductions_before() + backward_.started;
  };
  const auto weak = weak_from_this();
  return {.started = [weak, started] { return weak.lock() ? started() : 0; },
          .finish =
              [weak](std::uint64_t count) {
                if (const auto self = weak.lock()) self->finish_reductions(count);
              }};
}

/// All ranks have started `count` reductions and call this at the same position in the order of gathers, so none of
/// them waits in a gather. One reduction may run beside the next unit's backward.
void Reducer::Impl::finish_reductions(std::uint64_t count) {
  const std::lock_guard lock(mutex_);
  if (backward_.phase != Phase::kReducing || !storage_->sharded()) return;
  try {
    while (reductions_before() + backward_.taken + 1 < count) take_bucket();
    deliver_taken();
  } catch (...) {
    abort_group("before a gather");
    rethrow_with_advice();
  }
}

// ---- results

void Reducer::Impl::finish_backward() {
  used_.check_complete(backward_.started);
  while (backward_.started < plan.size()) start_bucket(backward_.started++);
  notify(kJoinEndOfBackward);
  if (parameter_shards_) parameter_shards_->end_backward();
  agree_on_used();
  last_readers_.clear();
  last_readers_.add_current();
  seen_.add_current();
  while (backward_.delivered < plan.size()) {
    if (backward_.taken == backward_.delivered) take_bucket();
    deliver(backward_.delivered++);
  }
  average_replicas();
  for (std::size_t i = dense_.size(); i < parameters_.size(); ++i) {
    at::Tensor& gradient = parameters_[i].tensor.mutable_grad();
    if (used_.used_anywhere(i)) gradient = average_sparse(gradient, parameters_[i].tensor, group_);
  }
  divide_by_active_ranks();
  used_.end_backward();
  Backward ended = leave_backward();
  ended.end = Clock::now();
  if (ended.first_gradient == Clock::time_point{}) ended.first_gradient = ended.last_gradient = ended.end;
  stats_.add(ended);
  rebuild();
}

/// Finds the parameters used on any rank. Collective where needed.
void Reducer::Impl::agree_on_used() {
  // A backward may have passed undetected. On a device, reading the answer would block the host in each step.
  const bool compares_forwards = used_.forwards_hidden() && !join_ && !seen_.has_streams();
  if (used_.must_be_complete() && !compares_forwards) return;
  used_.agree(/*has_inputs=*/backward_.phase != Phase::kShadow);
  // In join(), a rank without inputs cannot learn the graph. All ranks learn it in the same backward.
  if (used_.learns_graph() && (!join_ || join_->active() == group_.world_size())) used_.learn_graph();
}

/// Waits for the next bucket. The memory of a sharded bucket is freed.
void Reducer::Impl::take_bucket() {
  const std::size_t b = backward_.taken++;
  const Clock::time_point before = stats_.has_timeline() ? Clock::now() : Clock::time_point{};
  wait_for_result(backward_.buckets[b]);
  if (b >= backward_.finished) {
    const Clock::time_point now = backward_.buckets[b].finished = Clock::now();
    stats_.record_wait(b, before, now);
  }
  if (!storage_->sharded()) return;
  const at::NoGradGuard no_grad;
  BucketState& bucket = backward_.buckets[b];
  bucket.shard = storage_->take_shard(b, seen_);
  for (const std::size_t index : plan[b]) {
    if (used_.arrivals(index) > 0) drop_gradient(index);
  }
}

/// The gradient is in the bucket.
void Reducer::Impl::drop_gradient(std::size_t index) {
  const at::Tensor gradient = std::exchange(parameters_[index].tensor.mutable_grad(), {});
  // Copied to the bucket on this stream, which may not be the gradient's stream.
  const auto& stream = backward_.buckets[*bucket_of_[index]].stream;
  if (stream && gradient.defined()) gradient.record_stream(*stream);
}

/// Which parameters were used may be known only at the end of backward.
void Reducer::Impl::deliver_taken() {
  if (!used_.must_be_complete()) return;
  while (backward_.delivered < backward_.taken) deliver(backward_.delivered++);
}

void Reducer::Impl::deliver(std::size_t b) {
  if (storage_->sharded()) return deliver_shard(b);
  for (const std::size_t index : plan[b]) {
    if (used_.used_anywhere(index)) {
      storage_->write_back(index);
    } else {
      storage_->restore(index);
    }
  }
  storage_->flush_copies_out();
}

/// After the call, the current stream may read the bucket's result.
void Reducer::Impl::wait_for_result(BucketState& bucket) {
  if (!bucket.finish) {
    if (bucket.work.valid()) bucket.work.wait();  // On a device, the current stream waits for the collective.
    bucket.work = {};
    return;
  }
  const at::NoGradGuard no_grad;
  {
    // The hook's tensors belong to the stream on which the hook ran. Their last use is on this stream, so the allocator
    // can reuse the memory at any time.
    const c10::OptionalStreamGuard there(bucket.stream);
    if (bucket.work.valid()) bucket.work.wait();
    bucket.work = {};
    const auto in_hook = enter_comm_hook();
    bucket.finish();  // call_hook() ensures that the result is in the bucket.
    bucket.finish = nullptr;
  }
  // The gradients are read on the current stream, after finish().
  if (bucket.stream) stream_waits(*seen_.current(), *bucket.stream);
}

void Reducer::Impl::deliver_shard(std::size_t b) {
  const auto output = shard_output_.lock();
  if (!output)
    throw Error("the optimizer that takes the gradients was destroyed during backward",
                {.rank = group_.rank(), .call = "backward", .bucket = b});
  const at::NoGradGuard no_grad;
  at::Tensor shard = std::exchange(backward_.buckets[b].shard, {});
  std::vector<std::uint8_t> used;  // [position]
  for (const std::size_t index : plan[b]) {
    used.push_back(used_.used_anywhere(index));
    if (used.back()) drop_gradient(index);
  }
  seen_.keep_alive(shard);  // Allocated on the stream that started the bucket, used and freed here.
  if (const double factor = join_factor(); factor != 1) shard.mul_(factor);
  if (replica_groups_.replicas) return backward_.replica_average.add(b, std::move(shard), std::move(used));
  output->receive(b, std::move(shard), used);
}

}  // namespace ddpkit
