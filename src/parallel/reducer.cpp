#include <ddpkit/parallel/reducer.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <unordered_map>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/comm/error.h>
#include <ddpkit/parallel/bucket_plan.h>

#include "parallel/debug.h"
#include "parallel/gradient_memory.h"
#include "parallel/graph.h"
#include "parallel/hook_call.h"
#include "parallel/join_session.h"
#include "parallel/reducer_events.h"
#include "parallel/sparse_gradient.h"
#include "parallel/timeline_recorder.h"

namespace ddpkit {
namespace {

using Clock = std::chrono::steady_clock;

/// With a sink, buckets that are reduced in place are no larger than they must be (a collective costs a few
/// microseconds), and backward goes on only while no more than this is under way: so the memory of gradients is bounded
/// however far one rank runs ahead of another.
constexpr std::size_t kSinkBucketBytes = std::size_t{1} << 20;
constexpr std::size_t kSinkBytesUnderWay = std::size_t{2} << 20;

constexpr std::size_t kNoBucket = static_cast<std::size_t>(-1);

double microseconds(Clock::duration time) { return std::chrono::duration<double, std::micro>(time).count(); }

}  // namespace

/// Shared with the hooks, which may outlive the reducer inside a graph.
class Reducer::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options);

  void install_hooks();
  void follow_parameters();
  void remove_hooks() noexcept;
  void set_comm_hook(CommHook hook);
  bool wants_outputs() const { return options_.find_unused_parameters && !graph_is_known() && synchronize; }
  void expect_gradients_of(const std::vector<at::Tensor>& outputs);
  void set_gradient_sink(GradientSink* sink);
  std::vector<NamedParameter> parameters() const;
  void set_timeline(std::optional<Timeline> timeline, std::uint64_t write_after);
  void note_outputs(const std::vector<at::Tensor>& outputs);
  DistributedDataParallelStats stats() const;
  void set_join(JoinSession* session, int index);
  void shadow_bucket();
  void shadow_end_of_backward();
  std::optional<ArenaStats> arena() const { return memory_->arena(); }

  std::atomic<bool> synchronize{true};
  std::vector<std::vector<std::size_t>> plan;  ///< [bucket][position]
  std::optional<BackwardTrace> trace;
  std::uint64_t backwards = 0;
  int rebuilds = 0;

 private:
  void install_hook(std::size_t index);

  /// Dense parameters come first, so that a dense parameter's index is also its place in memory_.
  struct Slot {
    NamedParameter parameter;
    std::shared_ptr<torch::autograd::Node> accumulator = {};  ///< Autograd keeps only a weak reference.
    std::uintptr_t hook = 0;
    std::size_t bucket = kNoBucket;  ///< None for a sparse one.
    bool fired = false;              ///< In this backward.
    bool used = false;               ///< In any backward since the last synchronised one, this one included.
    bool expected = true;            ///< Its bucket waits for it.
  };
  struct Bucket {
    std::size_t bytes = 0;
    std::size_t pending = 0;  ///< Expected gradients that are not there yet.
    Work work;
    std::function<at::Tensor()> finish;
    BucketTiming timing;
  };

  /// A static graph's used parameters are known from its first backward on.
  bool graph_is_known() const { return options_.static_graph && used_anywhere_.defined(); }
  bool allows_unused() const { return options_.find_unused_parameters || options_.static_graph; }
  std::vector<ParameterInfo> infos() const;
  void make_plan(const std::vector<std::size_t>& order);
  void tell_plan(const std::string& what) const;
  void lay_out();

  void on_gradient(std::size_t index, const at::Tensor& added);
  void begin_backward();
  void launch_complete_buckets();
  void feed_sink();
  void launch(std::size_t bucket);
  void end_backward();
  void finish_backward();
  void finish_dense();
  void finish_bucket(std::size_t bucket);
  void hand_over(std::size_t bucket, const std::uint8_t* used);
  void note_finished();
  void note_step();
  void record_step();
  void note_reached();
  void rebuild();
  void announce(int event);
  double join_factor() const;
  void divide_by_active_ranks();
  void begin_shadow();
  void note_arrival(std::size_t index);
  [[noreturn]] void throw_incomplete();
  void forget_backward() noexcept;
  void give_up(const std::string& where) noexcept;

  ProcessGroup group_;
  ReducerOptions options_;
  CommHook comm_hook_;
  mutable std::mutex mutex_;     ///< Gradients on several devices come from several threads.
  std::vector<Slot> slots_;      ///< [param]
  std::size_t dense_ = 0;        ///< Slots of dense parameters.
  std::vector<Bucket> buckets_;  ///< [bucket]
  std::unique_ptr<GradientMemory> memory_;
  std::unordered_map<torch::autograd::Node*, std::size_t> slot_of_;
  GradientSink* sink_ = nullptr;
  std::size_t next_bucket_ = 0;    ///< Buckets are reduced in this order on every rank, whatever order they fill in.
  std::size_t next_finished_ = 0;  ///< The first bucket that has not been seen to be over.
  std::size_t next_taken_ = 0;     ///< The first bucket whose result has not been taken.
  bool in_backward_ = false;
  bool has_hint_ = false;              ///< expect_gradients_of() has been called since the last backward.
  std::vector<bool> reached_;          ///< By the graphs of the outputs it was shown. [param]
  at::Tensor used_anywhere_;           ///< 1 where a parameter was used on some rank: uint8. [param]
  std::vector<bool> used_here_;        ///< In a static graph's first backward. [param]
  std::vector<std::size_t> arrivals_;  ///< Dense parameters in the order their gradients came in the first backward.
  JoinSession* join_ = nullptr;
  int join_index_ = 0;
  bool shadows_ = false;  ///< This rank has run out of inputs.
  Clock::time_point first_gradient_;
  Clock::time_point last_gradient_;
  std::uint64_t bytes_ = 0, sent_bytes_ = 0;  ///< Over all synchronised backwards, as the next two.
  Clock::duration communication_{}, hidden_{};
  std::optional<Timeline> timeline_;
  std::uint64_t write_timeline_after_ = 0;  ///< Backwards that are left to be recorded; 0: the caller writes it.
  Clock::time_point reached_output_;        ///< When backward came to an output of forward; only with a timeline.
};

namespace {

class GradientHook : public torch::autograd::FunctionPostHook {
 public:
  explicit GradientHook(std::function<void(const at::Tensor&)> call) : call_(std::move(call)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    call_(inputs.empty() ? at::Tensor() : inputs[0]);
    return outputs;
  }

 private:
  std::function<void(const at::Tensor&)> call_;
};

}  // namespace

Reducer::Impl::Impl(std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options)
    : group_(std::move(group)), options_(options) {
  std::stable_partition(parameters.begin(), parameters.end(), [](const auto& parameter) { return !parameter.sparse; });
  for (NamedParameter& parameter : parameters) {
    if (!parameter.sparse) ++dense_;
    slots_.push_back({.parameter = std::move(parameter)});
  }
  reached_.resize(slots_.size());
  lay_out();
}

std::vector<ParameterInfo> Reducer::Impl::infos() const {
  std::vector<ParameterInfo> infos;
  for (std::size_t i = 0; i < dense_; ++i) {
    const at::Tensor& tensor = slots_[i].parameter.tensor;
    infos.push_back(
        {.numel = static_cast<std::size_t>(tensor.numel()), .dtype = tensor.scalar_type(), .device = tensor.device()});
  }
  return infos;
}

/// Memory and buckets for the hook there is. Collective.
void Reducer::Impl::lay_out() {
  std::vector<NamedParameter> dense;
  for (std::size_t i = 0; i < dense_; ++i) dense.push_back(slots_[i].parameter);
  memory_ = std::make_unique<GradientMemory>(dense, group_,
                                             GradientMemory::Options{.as_bucket_view = options_.gradient_as_bucket_view,
                                                                     .flat = static_cast<bool>(comm_hook_),
                                                                     .arena = options_.arena,
                                                                     .arena_bytes = options_.arena_bytes});
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < dense_; ++i) order.push_back(i);
  make_plan(order);
  tell_plan("buckets");
}

/// For DDPKIT_DEBUG. The plan is the same on all ranks.
void Reducer::Impl::tell_plan(const std::string& what) const {
  if (debug_level() < DebugLevel::kInfo || group_.rank() != 0) return;
  debug_line(group_, fmt::format("{}: {} for {} dense parameters, {} sparse ones beside", what, plan.size(), dense_,
                                 slots_.size() - dense_));
  for (std::size_t b = 0; b < plan.size(); ++b) {
    std::vector<std::string> names;
    for (const std::size_t index : plan[b]) names.push_back(slots_[index].parameter.name);
    debug_line(group_, fmt::format("  bucket {}: {} bytes, {} parameters: {}", b, buckets_[b].bytes, names.size(),
                                   fmt::join(names, ", ")));
  }
}

/// `order`: all dense parameters; the last one's gradient comes first.
void Reducer::Impl::make_plan(const std::vector<std::size_t>& order) {
  const auto all = infos();
  std::vector<ParameterInfo> ordered;
  for (const std::size_t index : order) ordered.push_back(all[index]);
  const bool small = sink_ && !memory_->flat();
  const auto cap = [small](std::size_t bytes) { return small ? std::min(bytes, kSinkBucketBytes) : bytes; };
  plan = plan_buckets(ordered, cap(options_.first_bucket_bytes), cap(options_.bucket_bytes));
  buckets_.clear();
  for (auto& members : plan) {
    Bucket& bucket = buckets_.emplace_back();
    for (std::size_t& index : members) {
      index = order[index];
      bucket.bytes += all[index].bytes();
      slots_[index].bucket = buckets_.size() - 1;
    }
    bucket.timing.bytes = bucket.bytes;
    bucket.timing.parameters = members.size();
  }
  memory_->lay_out(plan);
}

void Reducer::Impl::set_comm_hook(CommHook hook) {
  const std::lock_guard lock(mutex_);
  if (in_backward_) throw InvalidArgument("a communication hook cannot be set while backward runs");
  if (hook && sink_)
    throw InvalidArgument("gradients are sharded: a communication hook, which reduces whole ones, cannot go with that");
  const bool same_memory = static_cast<bool>(comm_hook_) == static_cast<bool>(hook);
  comm_hook_ = std::move(hook);
  if (same_memory) return;
  lay_out();
  arrivals_.clear();
  rebuilds = 0;
}

void Reducer::Impl::set_gradient_sink(GradientSink* sink) {
  const std::lock_guard lock(mutex_);
  if (in_backward_) throw InvalidArgument("the gradients' sink cannot be set while backward runs");
  if (sink && comm_hook_)
    throw InvalidArgument("a communication hook reduces whole gradients: it cannot go with sharded ones");
  if (sink && dense_ < slots_.size())
    throw InvalidArgument(
        fmt::format("the gradient of {} is sparse: it cannot be sharded", slots_[dense_].parameter.name));
  for (const Slot& slot : slots_) {
    if (sink && !slot.parameter.tensor.is_non_overlapping_and_dense())
      throw InvalidArgument(fmt::format(
          "parameter {} is not dense in memory: it cannot be sharded (make it contiguous)", slot.parameter.name));
  }
  sink_ = sink;
  memory_->set_sharded(sink != nullptr);
  std::vector<std::size_t> order;  // As it is.
  for (const auto& members : plan) order.insert(order.end(), members.begin(), members.end());
  std::reverse(order.begin(), order.end());
  make_plan(order);
}

std::vector<NamedParameter> Reducer::Impl::parameters() const {
  std::vector<NamedParameter> parameters;
  for (const Slot& slot : slots_) parameters.push_back(slot.parameter);
  return parameters;
}

void Reducer::Impl::install_hooks() {
  for (std::size_t index = 0; index < slots_.size(); ++index) install_hook(index);
}

void Reducer::Impl::install_hook(std::size_t index) {
  Slot& slot = slots_[index];
  slot_of_.erase(slot.accumulator.get());
  slot.accumulator = torch::autograd::impl::grad_accumulator(slot.parameter.tensor);
  if (!slot.accumulator)
    throw InvalidArgument(fmt::format("parameter {} is not a leaf that wants a gradient", slot.parameter.name));
  slot_of_[slot.accumulator.get()] = index;
  slot.hook = slot.accumulator->add_post_hook(
      std::make_unique<GradientHook>([weak = weak_from_this(), index](const at::Tensor& added) {
        if (const auto self = weak.lock()) self->on_gradient(index, added);
      }));
}

void Reducer::Impl::follow_parameters() {
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    Slot& slot = slots_[index];
    if (torch::autograd::impl::try_get_grad_accumulator(slot.parameter.tensor) == slot.accumulator) continue;
    const std::lock_guard lock(mutex_);
    slot.accumulator->del_post_hook(slot.hook);
    install_hook(index);
  }
}

void Reducer::Impl::remove_hooks() noexcept {
  for (Slot& slot : slots_) {
    if (slot.hook != 0) slot.accumulator->del_post_hook(slot.hook);
    slot.hook = 0;
  }
}

void Reducer::Impl::expect_gradients_of(const std::vector<at::Tensor>& outputs) {
  const std::lock_guard lock(mutex_);
  if (!has_hint_) reached_.assign(slots_.size(), false);
  has_hint_ = true;
  visit_graph(outputs, [this](torch::autograd::Node* node) {
    if (const auto found = slot_of_.find(node); found != slot_of_.end()) reached_[found->second] = true;
  });
}

void Reducer::Impl::begin_backward() {
  in_backward_ = true;
  next_bucket_ = next_finished_ = next_taken_ = 0;
  for (Bucket& bucket : buckets_) {
    bucket.pending = 0;
    bucket.timing.ready = {};
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
  // Runs when the whole graph has been walked, on the thread that called backward().
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
    memory_->take(index, added);
    Bucket& bucket = buckets_[slot.bucket];
    bucket.timing.ready = last_gradient_;
    if (slot.expected) --bucket.pending;
    note_finished();
    launch_complete_buckets();
  } catch (...) {
    give_up("at the gradient of " + slot.parameter.name);
    throw;
  }
}

void Reducer::Impl::note_arrival(std::size_t index) {
  if (rebuilds == 0 && index < dense_ && arrivals_.size() < dense_) arrivals_.push_back(index);
}

void Reducer::Impl::launch_complete_buckets() {
  // Which parameters a static graph uses is known only when its first backward ends.
  if (options_.static_graph && !graph_is_known()) return;
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].pending == 0) launch(next_bucket_++);
  if (sink_ && !(allows_unused() && !graph_is_known())) feed_sink();
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

void Reducer::Impl::launch(std::size_t b) {
  Bucket& bucket = buckets_[b];
  for (const std::size_t index : plan[b]) {
    if (!slots_[index].fired) memory_->take_unused(index);
  }
  bucket.timing.started = Clock::now();
  if (bucket.timing.ready == Clock::time_point{}) bucket.timing.ready = bucket.timing.started;  // None was used.
  announce(kJoinBucket);
  bucket.timing.sent_bytes = group_.world_size() > 1 ? bucket.bytes : 0;
  if (sink_ && b == 0) sink_->begin();
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
  try {
    finish_backward();
  } catch (...) {
    give_up("at its end");
    throw;
  }
}

void Reducer::Impl::finish_backward() {
  bool complete = true;
  for (const Slot& slot : slots_) complete = complete && (slot.fired || !slot.expected);
  if (!complete && !allows_unused()) throw_incomplete();
  if (!complete && graph_is_known()) throw_incomplete();
  while (next_bucket_ < buckets_.size()) launch(next_bucket_++);
  announce(kJoinEndOfBackward);
  if (allows_unused() && !graph_is_known()) {
    used_anywhere_ = at::empty({static_cast<std::int64_t>(slots_.size())}, at::kByte);
    auto* used = used_anywhere_.data_ptr<std::uint8_t>();
    used_here_.clear();
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      used[i] = slots_[i].used;
      used_here_.push_back(slots_[i].used);
    }
    used_anywhere_ = used_anywhere_.to(group_.device());
    group_.all_reduce(used_anywhere_, ReduceOp::kMax);
    used_anywhere_ = used_anywhere_.cpu();
  }
  finish_dense();
  for (std::size_t i = dense_; i < slots_.size(); ++i) {
    at::Tensor& gradient = slots_[i].parameter.tensor.mutable_grad();
    if (allows_unused() && used_anywhere_.const_data_ptr<std::uint8_t>()[i] == 0) continue;
    gradient = average_sparse(gradient, slots_[i].parameter.tensor, group_);
  }
  divide_by_active_ranks();
  for (Slot& slot : slots_) slot.used = false;
  in_backward_ = false;
  has_hint_ = false;
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

/// Buckets end in the order in which they were launched. Asking also moves them on.
void Reducer::Impl::note_finished() {
  for (; next_finished_ < next_bucket_; ++next_finished_) {
    Bucket& bucket = buckets_[next_finished_];
    if (bucket.finish || !bucket.work.is_completed()) return;
    bucket.timing.finished = Clock::now();
  }
}

/// Adds the last backward to what stats() tells.
void Reducer::Impl::note_step() {
  Clock::time_point covered = trace->first_gradient;
  for (const BucketTiming& bucket : trace->buckets) {
    bytes_ += bucket.bytes;
    sent_bytes_ += bucket.sent_bytes;
    const Clock::time_point begin = std::max(bucket.started, covered);
    if (bucket.sent_bytes == 0 || bucket.finished <= begin) continue;
    communication_ += bucket.finished - begin;
    hidden_ += std::max(Clock::duration{}, std::min(bucket.finished, trace->last_gradient) - begin);
    covered = bucket.finished;
  }
}

void Reducer::Impl::record_step() {
  TimelineRecorder& to = *timeline_->recorder();
  const bool reached = reached_output_ != Clock::time_point{} && reached_output_ <= trace->first_gradient;
  to.add("backward", TimelineRecorder::kCompute, reached ? reached_output_ : trace->first_gradient, trace->end,
         {.step = backwards - 1});
  reached_output_ = {};
  for (std::size_t b = 0; b < trace->buckets.size(); ++b) {
    const BucketTiming& timing = trace->buckets[b];
    const int track = TimelineRecorder::bucket_track(b);
    to.add(fmt::format("bucket {}", b), track, timing.ready, timing.finished,
           {.step = backwards - 1, .bytes = timing.bytes, .parameters = timing.parameters});
    to.add("reduction", track, timing.started, timing.finished, {.bytes = timing.sent_bytes});
  }
  if (write_timeline_after_ == 0 || --write_timeline_after_ > 0) return;
  timeline_->write();
  timeline_.reset();
}

DistributedDataParallelStats Reducer::Impl::stats() const {
  const std::lock_guard lock(mutex_);
  DistributedDataParallelStats stats{.steps = backwards,
                                     .rebuilds = rebuilds,
                                     .bytes = bytes_,
                                     .sent_bytes = sent_bytes_,
                                     .communication_us = microseconds(communication_),
                                     .hidden_us = microseconds(hidden_)};
  if (!trace) return stats;
  const auto since = [&](Clock::time_point time) { return microseconds(time - trace->first_gradient); };
  for (const BucketTiming& timing : trace->buckets) {
    stats.buckets.push_back({.parameters = timing.parameters,
                             .bytes = timing.bytes,
                             .sent_bytes = timing.sent_bytes,
                             .ready_us = since(timing.ready),
                             .started_us = since(timing.started),
                             .done_us = since(timing.finished)});
  }
  stats.last_gradient_us = since(trace->last_gradient);
  stats.end_us = since(trace->end);
  return stats;
}

void Reducer::Impl::set_timeline(std::optional<Timeline> timeline, std::uint64_t write_after) {
  const std::lock_guard lock(mutex_);
  timeline_ = std::move(timeline);
  write_timeline_after_ = write_after;
}

void Reducer::Impl::note_outputs(const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.grad_fn()) continue;
    output.register_hook([weak = weak_from_this()](const at::Tensor&) {
      if (const auto self = weak.lock()) self->note_reached();
    });
  }
}

void Reducer::Impl::note_reached() {
  const std::lock_guard lock(mutex_);
  if (synchronize && reached_output_ == Clock::time_point{}) reached_output_ = Clock::now();
}

void Reducer::Impl::finish_dense() {
  while (next_taken_ < buckets_.size()) finish_bucket(next_taken_++);
}

void Reducer::Impl::finish_bucket(std::size_t b) {
  const std::uint8_t* used = allows_unused() ? used_anywhere_.const_data_ptr<std::uint8_t>() : nullptr;
  Bucket& bucket = buckets_[b];
  const Clock::time_point before = timeline_ ? Clock::now() : Clock::time_point{};
  if (bucket.work.valid()) bucket.work.wait();
  bucket.work = {};
  if (bucket.finish) {
    const at::NoGradGuard no_grad;
    bucket.finish();  // call_hook() has seen to it that the result is in the bucket.
    bucket.finish = nullptr;
  }
  if (b >= next_finished_) {
    bucket.timing.finished = Clock::now();
    if (timeline_)
      timeline_->recorder()->add(fmt::format("wait for bucket {}", b), TimelineRecorder::kCompute, before,
                                 bucket.timing.finished);
  }
  if (sink_) return hand_over(b, used);
  for (const std::size_t index : plan[b]) {
    if (used && used[index] == 0) {
      memory_->keep(index);
    } else {
      memory_->give(index);
    }
  }
}

void Reducer::Impl::hand_over(std::size_t b, const std::uint8_t* used) {
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
    if (const double factor = join_factor(); factor != 1) slices.back().mul_(factor);
  }
  sink_->receive(parameters, std::move(slices));
}

void Reducer::Impl::set_join(JoinSession* session, int index) {
  const std::lock_guard lock(mutex_);
  join_ = session;
  join_index_ = index;
  shadows_ = false;
}

void Reducer::Impl::announce(int event) {
  if (join_ && !shadows_) join_->announce(join_index_, event);
}

/// What an average over all ranks is multiplied by to be one over those that still have inputs.
double Reducer::Impl::join_factor() const {
  if (!join_ || join_->options().divide_by_initial_world_size) return 1;
  return static_cast<double>(group_.world_size()) / join_->active();
}

void Reducer::Impl::divide_by_active_ranks() {
  const double factor = join_factor();
  if (factor == 1 || sink_) return;
  const at::NoGradGuard no_grad;
  for (Slot& slot : slots_) {
    at::Tensor& gradient = slot.parameter.tensor.mutable_grad();
    if (gradient.defined()) gradient.mul_(factor);
  }
}

/// Once, after the first backward: buckets in the order in which gradients really come, which is not always the reverse
/// of the order in which the parameters were registered. As in Python not where each backward may use others.
void Reducer::Impl::rebuild() {
  if (rebuilds != 0 || (options_.find_unused_parameters && !options_.static_graph)) return;
  ++rebuilds;
  std::vector<std::int64_t> order;  // Rank 0's counts: the plan must be the same everywhere.
  std::vector<bool> seen(dense_, false);
  for (const std::size_t index : arrivals_) {
    order.push_back(static_cast<std::int64_t>(index));
    seen[index] = true;
  }
  for (std::size_t i = dense_; i-- > 0;) {
    if (!seen[i]) order.push_back(static_cast<std::int64_t>(i));
  }
  arrivals_.clear();
  const at::Tensor agreed = at::tensor(order, at::kLong).to(group_.device());
  if (group_.world_size() > 1) group_.broadcast(agreed);
  const at::Tensor on_host = agreed.cpu();
  std::vector<std::size_t> first_comes_last;
  for (std::int64_t i = on_host.numel(); i-- > 0;)
    first_comes_last.push_back(static_cast<std::size_t>(on_host.const_data_ptr<std::int64_t>()[i]));
  make_plan(first_comes_last);
  tell_plan("buckets rebuilt in the order in which gradients came");
}

void Reducer::Impl::shadow_bucket() {
  const std::lock_guard lock(mutex_);
  begin_shadow();
  launch(next_bucket_++);
}

void Reducer::Impl::shadow_end_of_backward() {
  const std::lock_guard lock(mutex_);
  begin_shadow();
  finish_backward();
}

/// A backward without gradients.
void Reducer::Impl::begin_shadow() {
  shadows_ = true;
  if (in_backward_) return;
  in_backward_ = true;
  next_bucket_ = next_finished_ = next_taken_ = 0;
  for (Bucket& bucket : buckets_) bucket.timing.ready = {};
  for (Slot& slot : slots_) {
    slot.parameter.tensor.mutable_grad().reset();
    slot.fired = slot.used = slot.expected = false;
  }
  first_gradient_ = last_gradient_ = Clock::now();
}

void Reducer::Impl::throw_incomplete() {
  std::vector<std::string> names;
  for (const Slot& slot : slots_) {
    if (!slot.fired && slot.expected) names.push_back(slot.parameter.name);
  }
  const std::size_t count = names.size();
  if (count > 10) {
    names.resize(10);
    names.push_back("...");
  }
  const std::string advice =
      options_.static_graph ? "static_graph promises that each backward uses the same parameters as the first one did"
                            : "Every parameter that wants a gradient must take part in the loss on every rank; switch "
                              "the others off with "
                              "requires_grad_(false) before wrapping the model, or set find_unused_parameters";
  const std::string text = fmt::format("backward on rank {} gave no gradient to {} of {} parameters: {}. {}",
                                       group_.rank(), count, slots_.size(), fmt::join(names, ", "), advice);
  group_.abort(text);
  throw Error(text, {.rank = group_.rank(), .call = "backward", .bucket = next_bucket_});
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
  in_backward_ = false;
  has_hint_ = false;
  reached_output_ = {};
  for (Bucket& bucket : buckets_) {
    bucket.work = {};
    bucket.finish = nullptr;
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

void Reducer::set_gradient_sink(GradientSink* sink) { impl_->set_gradient_sink(sink); }

std::vector<NamedParameter> Reducer::parameters() const { return impl_->parameters(); }

bool Reducer::wants_outputs() const noexcept { return impl_->wants_outputs(); }

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
