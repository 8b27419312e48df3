#include "parallel/ddp/reducer_impl.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

#include "comm/timeline_recorder.h"
#include "comm/trace/recorder.h"
#include "parallel/ddp/debug.h"
#include "parallel/ddp/hook_call.h"
#include "parallel/ddp/reducer_events.h"
#include "parallel/ddp/sparse_gradient.h"
#include "parallel/join_session.h"
#include "parallel/model_agreement.h"

namespace ddpkit {
namespace {

/// With a sink, backward goes on only while no more than this is under way: so the memory of gradients is bounded
/// however far one rank runs ahead of another.
constexpr std::size_t kSinkBytesUnderWay = std::size_t{2} << 20;

}  // namespace

void Reducer::Impl::begin_backward() {
  follow_sink();
  in_backward_ = true;
  next_bucket_ = next_finished_ = next_taken_ = 0;
  for (Bucket& bucket : buckets_) {
    bucket.pending = 0;
    bucket.timing.ready = {};
    bucket.writers.clear();
  }
  used_.begin_backward();
  for (std::size_t index = 0; index < dense_; ++index) buckets_[*bucket_of_[index]].pending += used_.expects(index);
  first_gradient_ = last_gradient_ = {};
}

void Reducer::Impl::on_gradient(std::size_t index, const at::Tensor& added) {
  const std::lock_guard lock(mutex_);
  const NamedParameter& parameter = parameters_[index];
  // Autograd passes an undefined gradient on if a node gives none, such as a checkpoint whose part detaches its input.
  if (added.defined()) used_.mark_used(index);
  if (!synchronize) return;
  try {
    if (at::GradMode::is_enabled())
      throw InvalidArgument(fmt::format(
          "backward(create_graph=true) through DistributedDataParallel: the gradient of {} would lose its history when "
          "it is averaged; use torch::autograd::grad(..., create_graph=true) for the inner derivative",
          parameter.name));
    if (in_hook_)
      throw InvalidArgument(
          fmt::format("a communication hook cannot run a backward that gives a gradient to {}", parameter.name));
    enter_backward();
    if (!added.defined()) return;
    const std::optional<std::size_t> b = bucket_of_[index];
    used_.add(index, b);
    if (b && *b < next_bucket_) used_.throw_late(index, *b);
    last_gradient_ = Clock::now();
    if (first_gradient_ == Clock::time_point{}) first_gradient_ = last_gradient_;
    note_arrival(index);
    const at::Tensor& gradient = parameter.tensor.grad();
    if (debug_level() >= DebugLevel::kDetail) warn_unless_finite(parameter.name, gradient, group_, backwards);
    if (!b) return;
    if (gradient.defined() && gradient.layout() != at::kStrided)
      throw InvalidArgument(
          fmt::format("the gradient of {} is sparse, but its module is no torch::nn::Embedding or EmbeddingBag made "
                      "with sparse(true), by which DistributedDataParallel knows beforehand",
                      parameter.name));
    Bucket& bucket = buckets_[*b];
    note_writer(bucket);
    bucket.timing.ready = last_gradient_;
    // Autograd may still add to it.
    if (!used_.is_ready(index)) return;
    memory_->take(index, added);
    if (used_.expects(index)) --bucket.pending;
    note_finished();
    launch_complete_buckets();
  } catch (...) {
    give_up("at the gradient of " + parameter.name);
    rethrow_with_advice();
  }
}

void Reducer::Impl::launch_complete_buckets() {
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].pending == 0) launch(next_bucket_++);
  if (memory_->sharded() && used_.must_be_complete()) feed_sink();
}

/// Hands over what is there, and waits for what is too much to be under way. No rank waits for one that needs
/// something of it first: buckets are reduced in one order on all.
void Reducer::Impl::feed_sink() {
  note_finished();
  while (next_taken_ < next_finished_) finish_bucket(next_taken_++);
  if (memory_->flat()) return;
  std::size_t under_way = 0;
  for (std::size_t b = next_taken_; b < next_bucket_; ++b) under_way += buckets_[b].bytes;
  while (under_way > kSinkBytesUnderWay) {
    under_way -= buckets_[next_taken_].bytes;
    finish_bucket(next_taken_++);
  }
}

/// Before the current stream is given work on a bucket's memory.
void Reducer::Impl::note_writer(Bucket& bucket) {
  if (!bucket.writers.add_current()) return;
  seen_.add_current();
  // A gradient is not copied into the bucket before the last backward's has been copied out of it.
  last_readers_.current_waits();
}

void Reducer::Impl::launch(std::size_t b) {
  Bucket& bucket = buckets_[b];
  note_writer(bucket);
  // Gradients of one bucket may have come on several streams: the reduction, which waits for the current stream, comes
  // after all of them.
  bucket.writers.current_waits();
  bucket.stream = bucket.writers.current();
  for (const std::size_t index : plan[b]) {
    if (used_.arrivals(index) == 0) {
      memory_->take_unused(index);
    } else if (used_.learns_graph()) {
      memory_->take(index, {});
    }
  }
  bucket.timing.started = Clock::now();
  if (bucket.timing.ready == Clock::time_point{}) bucket.timing.ready = bucket.timing.started;  // None was used.
  announce(kJoinBucket);
  bucket.timing.sent_bytes = group_.world_size() > 1 ? bucket.bytes : 0;
  memory_->gather(b);
  if (sink_ && b == 0) sink_->begin();
  flight::Recorder::of_process().set_bucket(b);
  if (!comm_hook_) {
    bucket.work = memory_->start(b);
    return;
  }
  GradBucket shown;
  shown.index = b;
  shown.is_last = b + 1 == buckets_.size();
  shown.buffer = memory_->buffer(b);
  for (const std::size_t index : plan[b]) {
    shown.gradients.push_back(memory_->home(index));
    shown.parameters.push_back(parameters_[index].tensor);
    shown.names.push_back(parameters_[index].name);
  }
  in_hook_ = true;
  PendingReduction pending = call_hook(comm_hook_, std::move(shown), group_);
  in_hook_ = false;
  if (group_.world_size() > 1) bucket.timing.sent_bytes = pending.sent_bytes.value_or(memory_->buffer(b).nbytes());
  bucket.work = std::move(pending.work);
  bucket.finish = std::move(pending.finish);
}

void Reducer::Impl::finish_backward() {
  used_.check_complete(next_bucket_);
  while (next_bucket_ < buckets_.size()) launch(next_bucket_++);
  announce(kJoinEndOfBackward);
  agree_on_used();
  finish_dense();
  for (std::size_t i = dense_; i < parameters_.size(); ++i) {
    at::Tensor& gradient = parameters_[i].tensor.mutable_grad();
    if (used_.used_anywhere(i)) gradient = average_sparse(gradient, parameters_[i].tensor, group_);
  }
  divide_by_active_ranks();
  used_.end_backward();
  leave_backward();
  ++backwards;
  if (!trace) trace.emplace();
  trace->end = Clock::now();
  const bool is_empty = first_gradient_ == Clock::time_point{};
  trace->first_gradient = is_empty ? trace->end : first_gradient_;
  trace->last_gradient = is_empty ? trace->end : last_gradient_;
  trace->buckets.clear();
  for (const Bucket& bucket : buckets_) trace->buckets.push_back(bucket.timing);
  note_step();
  if (timeline_) record_step();
  rebuild();
}

/// Collective where it is needed: which parameters were used on some rank.
void Reducer::Impl::agree_on_used() {
  // A backward may have passed unseen. On a device the answer would stop the host in each step.
  const bool compares_forwards = used_.forwards_hidden() && !join_ && !seen_.has_streams();
  if (used_.must_be_complete() && !compares_forwards) return;
  used_.agree(/*has_inputs=*/!shadows_);
  // In join(), a rank without inputs cannot learn the graph. All ranks learn it in the same backward.
  if (used_.learns_graph() && (!join_ || join_->active() == group_.world_size())) used_.learn_graph();
}

void Reducer::Impl::finish_dense() {
  last_readers_.clear();
  last_readers_.add_current();
  seen_.add_current();
  while (next_taken_ < buckets_.size()) finish_bucket(next_taken_++);
}

void Reducer::Impl::finish_bucket(std::size_t b) {
  Bucket& bucket = buckets_[b];
  const Clock::time_point before = timeline_ ? Clock::now() : Clock::time_point{};
  take_result(bucket);
  if (b >= next_finished_) {
    bucket.timing.finished = Clock::now();
    if (timeline_)
      timeline_->recorder()->add(fmt::format("wait for bucket {}", b), TimelineRecorder::kCompute, before,
                                 bucket.timing.finished);
  }
  if (memory_->sharded()) return hand_over(b);
  for (const std::size_t index : plan[b]) {
    if (used_.used_anywhere(index)) {
      memory_->give(index);
    } else {
      memory_->keep(index);
    }
  }
  memory_->scatter();
}

/// The current stream may read the bucket's result.
void Reducer::Impl::take_result(Bucket& bucket) {
  if (!bucket.finish) {
    if (bucket.work.valid()) bucket.work.wait();  // On a device: the current stream waits for the collective.
    bucket.work = {};
    return;
  }
  const at::NoGradGuard no_grad;
  {
    // A hook's tensors belong to the stream on which the hook ran: there they are used to the end, so that the
    // allocator may have them back at any time.
    const c10::OptionalStreamGuard there(bucket.stream);
    if (bucket.work.valid()) bucket.work.wait();
    bucket.work = {};
    in_hook_ = true;
    bucket.finish();  // call_hook() has seen to it that the result is in the bucket.
    in_hook_ = false;
    bucket.finish = nullptr;
  }
  // The gradients are read on the current stream: after finish().
  if (bucket.stream) stream_waits(*seen_.current(), *bucket.stream);
}

void Reducer::Impl::hand_over(std::size_t b) {
  if (!sink_)
    throw Error("the optimizer that takes the gradients was destroyed during backward",
                {.rank = group_.rank(), .call = "backward", .bucket = b});
  const at::NoGradGuard no_grad;
  std::vector<std::size_t> parameters;
  std::vector<at::Tensor> slices;
  for (const std::size_t index : plan[b]) {
    if (!used_.used_anywhere(index)) {
      memory_->keep(index);
      continue;
    }
    parameters.push_back(index);
    slices.push_back(memory_->take_slice(index));
    seen_.keep_alive(slices.back());  // Allocated where the bucket was launched, used and let go of here.
    if (const double factor = join_factor(); factor != 1) slices.back().mul_(factor);
  }
  sink_->receive(parameters, std::move(slices));
}

}  // namespace ddpkit
