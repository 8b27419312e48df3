#include "parallel/reducer_impl.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/comm/error.h>

#include "comm/flight/recorder.h"
#include "parallel/debug.h"
#include "parallel/hook_call.h"
#include "parallel/reducer_events.h"
#include "parallel/sparse_gradient.h"
#include "parallel/timeline_recorder.h"

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
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    Slot& slot = slots_[index];
    slot.fired = false;
    slot.expected = true;
    if (graph_is_known()) {
      slot.expected = used_here_[index];
    } else if (options_.find_unused_parameters && has_hint_) {
      slot.expected = reached_[index];
    }
    if (slot.expected && slot.bucket != kNoBucket) ++buckets_[slot.bucket].pending;
  }
  first_gradient_ = Clock::now();
  queue_end();
}

/// At the end of the backward that runs here. It runs when the whole graph has been walked: on the CPU on the thread
/// that called backward(), else on autograd's own of the device, with that caller's current stream, which then waits
/// for the streams of all hooks.
void Reducer::Impl::queue_end() {
  put_off_ = false;
  torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this()] { self->end_backward(); });
}

void Reducer::Impl::on_gradient(std::size_t index, const at::Tensor& added) {
  const std::lock_guard lock(mutex_);
  Slot& slot = slots_[index];
  slot.used = true;
  if (!synchronize) return;
  try {
    if (at::GradMode::is_enabled())
      throw InvalidArgument(fmt::format(
          "backward(create_graph=true) through DistributedDataParallel: the gradient of {} would lose its history when "
          "it is averaged; use torch::autograd::grad(..., create_graph=true) for the inner derivative",
          slot.parameter.name));
    // An earlier backward that threw half-way left its state behind.
    if (in_backward_ && slot.fired) forget_backward();
    if (!in_backward_) begin_backward();
    if (put_off_) queue_end();
    if (slot.bucket != kNoBucket && slot.bucket < next_bucket_)
      throw Error(fmt::format("parameter {} got a gradient though no output of forward comes from it, after its bucket "
                              "was reduced without it: find_unused_parameters and static_graph need the parameters "
                              "that take part in the loss to be used in forward (and the same ones each time)",
                              slot.parameter.name),
                  {.rank = group_.rank(), .call = "backward", .bucket = slot.bucket});
    slot.fired = true;
    last_gradient_ = Clock::now();
    note_arrival(index);
    const at::Tensor& gradient = slot.parameter.tensor.grad();
    if (debug_level() >= DebugLevel::kDetail) warn_unless_finite(slot.parameter.name, gradient, group_, backwards);
    if (slot.parameter.sparse) return;
    if (gradient.defined() && gradient.layout() != at::kStrided)
      throw InvalidArgument(
          fmt::format("the gradient of {} is sparse, but its module is no torch::nn::Embedding or EmbeddingBag made "
                      "with sparse(true), by which DistributedDataParallel knows beforehand",
                      slot.parameter.name));
    Bucket& bucket = buckets_[slot.bucket];
    note_writer(bucket);
    memory_->take(index, added);
    bucket.timing.ready = last_gradient_;
    if (slot.expected) --bucket.pending;
    note_finished();
    launch_complete_buckets();
  } catch (...) {
    give_up("at the gradient of " + slot.parameter.name);
    throw;
  }
}

void Reducer::Impl::launch_complete_buckets() {
  // Which parameters a static graph uses is known only when its first backward ends.
  if (options_.static_graph && !graph_is_known()) return;
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].pending == 0) launch(next_bucket_++);
  if (memory_->sharded() && must_be_complete()) feed_sink();
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
    if (!slots_[index].fired) memory_->take_unused(index);
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
    shown.parameters.push_back(slots_[index].parameter.tensor);
    shown.names.push_back(slots_[index].parameter.name);
  }
  PendingReduction pending = call_hook(comm_hook_, std::move(shown), group_);
  if (group_.world_size() > 1) bucket.timing.sent_bytes = pending.sent_bytes.value_or(memory_->buffer(b).nbytes());
  bucket.work = std::move(pending.work);
  bucket.finish = std::move(pending.finish);
}

void Reducer::Impl::end_backward() {
  const std::lock_guard lock(mutex_);
  if (!in_backward_) return;
  if (an_outer_backward_goes_on()) {
    reentrant_ = true;
    put_off_ = output_task_ < 0;
    return;
  }
  try {
    finish_backward();
  } catch (...) {
    give_up("at its end");
    throw;
  }
}

/// `action` runs whenever a backward comes by one of them.
void Reducer::Impl::at_outputs(const std::vector<at::Tensor>& outputs, void (Impl::*action)()) {
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.grad_fn()) continue;
    output.register_hook([weak = weak_from_this(), action](const at::Tensor&) {
      if (const auto self = weak.lock()) (self.get()->*action)();
    });
  }
}

void Reducer::Impl::note_task() {
  const std::lock_guard lock(mutex_);
  if (!synchronize) return;
  output_task_ = torch::autograd::get_current_graph_task_id();
  queue_end();
}

bool Reducer::Impl::is_complete() const {
  return std::all_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.fired || !slot.expected; });
}

/// When a backward has ended: whether it was one within another, as reentrant checkpointing has it, which may bring
/// more. Only then does the engine run a node on this thread. (As long as it nests no deeper than it has threads for.)
bool Reducer::Impl::an_outer_backward_goes_on() const {
  if (!torch::autograd::get_current_node()) return false;
  if (must_be_complete() && is_complete()) return false;
  return torch::autograd::get_current_graph_task_id() != output_task_;
}

void Reducer::Impl::finish_backward() {
  if (must_be_complete() && !is_complete()) throw_incomplete();
  while (next_bucket_ < buckets_.size()) launch(next_bucket_++);
  announce(kJoinEndOfBackward);
  if (!must_be_complete()) agree_on_used();
  finish_dense();
  for (std::size_t i = dense_; i < slots_.size(); ++i) {
    at::Tensor& gradient = slots_[i].parameter.tensor.mutable_grad();
    if (allows_unused() && used_anywhere_.const_data_ptr<std::uint8_t>()[i] == 0) continue;
    gradient = average_sparse(gradient, slots_[i].parameter.tensor, group_);
  }
  divide_by_active_ranks();
  for (Slot& slot : slots_) slot.used = false;
  in_backward_ = put_off_ = has_hint_ = false;
  output_task_ = -1;
  ++backwards;
  if (!trace) trace.emplace();
  trace->first_gradient = first_gradient_;
  trace->last_gradient = last_gradient_;
  trace->end = Clock::now();
  trace->buckets.clear();
  for (const Bucket& bucket : buckets_) trace->buckets.push_back(bucket.timing);
  note_step();
  if (timeline_) record_step();
  rebuild();
}

void Reducer::Impl::finish_dense() {
  last_readers_.clear();
  last_readers_.add_current();
  seen_.add_current();
  while (next_taken_ < buckets_.size()) finish_bucket(next_taken_++);
}

void Reducer::Impl::finish_bucket(std::size_t b) {
  const std::uint8_t* used = allows_unused() ? used_anywhere_.const_data_ptr<std::uint8_t>() : nullptr;
  Bucket& bucket = buckets_[b];
  const Clock::time_point before = timeline_ ? Clock::now() : Clock::time_point{};
  take_result(bucket);
  if (b >= next_finished_) {
    bucket.timing.finished = Clock::now();
    if (timeline_)
      timeline_->recorder()->add(fmt::format("wait for bucket {}", b), TimelineRecorder::kCompute, before,
                                 bucket.timing.finished);
  }
  if (memory_->sharded()) return hand_over(b, used);
  for (const std::size_t index : plan[b]) {
    if (used && used[index] == 0) {
      memory_->keep(index);
    } else {
      memory_->give(index);
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
    bucket.finish();  // call_hook() has seen to it that the result is in the bucket.
    bucket.finish = nullptr;
  }
  // The gradients are read on the current stream: after finish().
  if (bucket.stream) stream_waits(*seen_.current(), *bucket.stream);
}

void Reducer::Impl::hand_over(std::size_t b, const std::uint8_t* used) {
  if (!sink_)
    throw Error("the optimizer that takes the gradients was destroyed during backward",
                {.rank = group_.rank(), .call = "backward", .bucket = b});
  const at::NoGradGuard no_grad;
  std::vector<std::size_t> parameters;
  std::vector<at::Tensor> slices;
  for (const std::size_t index : plan[b]) {
    if (used && used[index] == 0) {
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

/// In a catch block: tells the other ranks, which would wait for this one in a later bucket or collective. Where the
/// error came from them, the group has ended already, and nothing changes.
void Reducer::Impl::give_up(const std::string& where) noexcept {
  forget_backward();
  try {
    try {
      throw;
    } catch (const std::exception& error) {
      group_.abort(fmt::format("backward on rank {} failed {}: {}", group_.rank(), where, error.what()));
    }
  } catch (...) {
    group_.abort("backward failed");
  }
}

void Reducer::Impl::forget_backward() noexcept {
  in_backward_ = put_off_ = has_hint_ = false;
  output_task_ = -1;
  reached_output_ = {};
  memory_->forget();
  arrivals_.clear();  // Half an order, which the next backward begins anew.
  for (Bucket& bucket : buckets_) {
    bucket.work = {};
    bucket.finish = nullptr;
  }
}

}  // namespace ddpkit
