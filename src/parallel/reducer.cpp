#include <ddpkit/parallel/reducer.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <functional>
#include <mutex>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/comm/error.h>
#include <ddpkit/parallel/bucket_plan.h>

namespace ddpkit {
namespace {

using Clock = std::chrono::steady_clock;

/// Gradients start on cache lines of their own in a bucket, whatever the parameter before them measures.
constexpr std::size_t kAlignment = 64;

std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

/// A tensor on part of `flat`'s memory, but not an autograd view of it: Optimizer::zero_grad() detaches gradients in
/// place, which a view refuses.
at::Tensor alias(const at::Tensor& flat, std::int64_t offset, const at::Tensor& like) {
  const at::NoGradGuard no_grad;
  // The layout AccumulateGrad prefers: the parameter's own where it is dense.
  const bool dense = like.is_non_overlapping_and_dense();
  const at::Tensor shaped = dense ? at::Tensor() : at::empty(like.sizes(), like.options().device(at::kMeta));
  return at::empty({0}, flat.options())
      .set_(flat.storage(), flat.storage_offset() + offset, like.sizes(), dense ? like.strides() : shaped.strides());
}

}  // namespace

/// Shared with the hooks, which may outlive the reducer inside a graph.
class Reducer::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options);

  void install_hooks();
  void remove_hooks() noexcept;

  std::atomic<bool> synchronize{true};
  std::vector<std::vector<std::size_t>> plan;  ///< [bucket][position]
  std::optional<BackwardTrace> trace;

 private:
  struct Slot {
    NamedParameter parameter;
    std::shared_ptr<torch::autograd::Node> accumulator = {};  ///< Autograd keeps only a weak reference.
    std::uintptr_t hook = 0;
    std::size_t bucket = 0;
    at::Tensor gradient = {};  ///< Aliases the bucket.
    bool ready = false;
  };
  struct Bucket {
    at::Tensor flat;
    std::size_t pending = 0;  ///< Parameters without a gradient yet in this backward.
    Work work;
    BucketTiming timing;
  };

  void on_gradient(std::size_t index);
  void begin_backward();
  void take_into_bucket(Slot& slot);
  void launch_complete_buckets();
  void end_backward();
  [[noreturn]] void throw_incomplete();
  void forget_backward() noexcept;

  ProcessGroup group_;
  std::mutex mutex_;             ///< Gradients on several devices come from several threads.
  std::vector<Slot> slots_;      ///< [param]
  std::vector<Bucket> buckets_;  ///< [bucket]
  std::size_t next_bucket_ = 0;  ///< Buckets are reduced in this order on every rank, whatever order they fill in.
  bool in_backward_ = false;
  Clock::time_point first_gradient_;
  Clock::time_point last_gradient_;
};

namespace {

class GradientHook : public torch::autograd::FunctionPostHook {
 public:
  explicit GradientHook(std::function<void()> call) : call_(std::move(call)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    call_();
    return outputs;
  }

 private:
  std::function<void()> call_;
};

}  // namespace

Reducer::Impl::Impl(std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options)
    : group_(std::move(group)) {
  std::vector<ParameterInfo> infos;
  for (const NamedParameter& parameter : parameters) {
    infos.push_back({.numel = static_cast<std::size_t>(parameter.tensor.numel()),
                     .dtype = parameter.tensor.scalar_type(),
                     .device = parameter.tensor.device()});
  }
  plan = plan_buckets(infos, options.first_bucket_bytes, options.bucket_bytes);
  for (NamedParameter& parameter : parameters) slots_.push_back({.parameter = std::move(parameter)});
  for (std::size_t b = 0; b < plan.size(); ++b) {
    Bucket& bucket = buckets_.emplace_back();
    const at::ScalarType dtype = infos[plan[b][0]].dtype;
    const std::size_t element = c10::elementSize(dtype);
    std::vector<std::int64_t> offsets;
    std::size_t bytes = 0;
    for (const std::size_t index : plan[b]) {
      offsets.push_back(static_cast<std::int64_t>(bytes / element));
      bytes += aligned(infos[index].bytes());
    }
    bucket.flat = group_.allocate({static_cast<std::int64_t>(bytes / element)}, dtype);
    bucket.flat.zero_();
    bucket.timing = {.bytes = bytes, .parameters = plan[b].size(), .ready = {}, .started = {}, .finished = {}};
    for (std::size_t position = 0; position < plan[b].size(); ++position) {
      Slot& slot = slots_[plan[b][position]];
      slot.bucket = b;
      slot.gradient = alias(bucket.flat, offsets[position], slot.parameter.tensor);
    }
  }
}

void Reducer::Impl::install_hooks() {
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    Slot& slot = slots_[index];
    slot.accumulator = torch::autograd::impl::grad_accumulator(slot.parameter.tensor);
    if (!slot.accumulator)
      throw InvalidArgument(fmt::format("parameter {} is not a leaf that wants a gradient", slot.parameter.name));
    slot.hook = slot.accumulator->add_post_hook(std::make_unique<GradientHook>([weak = weak_from_this(), index] {
      if (const auto self = weak.lock()) self->on_gradient(index);
    }));
  }
}

void Reducer::Impl::remove_hooks() noexcept {
  for (Slot& slot : slots_) {
    if (slot.hook != 0) slot.accumulator->del_post_hook(slot.hook);
    slot.hook = 0;
  }
}

void Reducer::Impl::begin_backward() {
  in_backward_ = true;
  next_bucket_ = 0;
  for (std::size_t b = 0; b < buckets_.size(); ++b) buckets_[b].pending = plan[b].size();
  for (Slot& slot : slots_) slot.ready = false;
  first_gradient_ = Clock::now();
  // Runs when the whole graph has been walked, on the thread that called backward().
  torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this()] { self->end_backward(); });
}

void Reducer::Impl::on_gradient(std::size_t index) {
  const std::lock_guard lock(mutex_);
  if (!synchronize) return;
  try {
    // An earlier backward that threw half-way left its state behind.
    if (in_backward_ && slots_[index].ready) forget_backward();
    if (!in_backward_) begin_backward();
    Slot& slot = slots_[index];
    take_into_bucket(slot);
    slot.ready = true;
    last_gradient_ = Clock::now();
    Bucket& bucket = buckets_[slot.bucket];
    if (--bucket.pending == 0) {
      bucket.timing.ready = last_gradient_;
      launch_complete_buckets();
    }
  } catch (...) {
    forget_backward();
    throw;
  }
}

void Reducer::Impl::take_into_bucket(Slot& slot) {
  const at::NoGradGuard no_grad;
  at::Tensor& gradient = slot.parameter.tensor.mutable_grad();
  if (!gradient.defined()) return slot.gradient.zero_(), void();
  if (gradient.layout() != at::kStrided)
    throw InvalidArgument(fmt::format("the gradient of {} is sparse, which DistributedDataParallel does not reduce",
                                      slot.parameter.name));
  // Kept from the last backward, it has been accumulated in place.
  if (gradient.data_ptr() == slot.gradient.data_ptr() && gradient.strides() == slot.gradient.strides()) return;
  // Made afresh by autograd, as after zero_grad(set_to_none): moved into the bucket, which it aliases from now on.
  slot.gradient.copy_(gradient);
  gradient = slot.gradient;
}

void Reducer::Impl::launch_complete_buckets() {
  for (; next_bucket_ < buckets_.size() && buckets_[next_bucket_].pending == 0; ++next_bucket_) {
    Bucket& bucket = buckets_[next_bucket_];
    bucket.timing.started = Clock::now();
    bucket.work = group_.all_reduce_async(bucket.flat, ReduceOp::kAvg);
  }
}

void Reducer::Impl::end_backward() {
  const std::lock_guard lock(mutex_);
  if (!in_backward_) return;
  try {
    if (next_bucket_ < buckets_.size()) throw_incomplete();
    for (Bucket& bucket : buckets_) {
      bucket.work.wait();
      bucket.work = {};
      bucket.timing.finished = Clock::now();
    }
  } catch (...) {
    forget_backward();
    throw;
  }
  in_backward_ = false;
  if (!trace) trace.emplace();
  trace->first_gradient = first_gradient_;
  trace->last_gradient = last_gradient_;
  trace->buckets.clear();
  for (const Bucket& bucket : buckets_) trace->buckets.push_back(bucket.timing);
}

void Reducer::Impl::throw_incomplete() {
  std::vector<std::string> names;
  for (const Slot& slot : slots_) {
    if (!slot.ready) names.push_back(slot.parameter.name);
  }
  const std::size_t count = names.size();
  if (count > 10) {
    names.resize(10);
    names.push_back("...");
  }
  const std::string text = fmt::format(
      "backward on rank {} gave no gradient to {} of {} parameters: {}. Every parameter that wants a gradient must "
      "take part "
      "in the loss on every rank; switch the others off with requires_grad_(false) before wrapping the model",
      group_.rank(), count, slots_.size(), fmt::join(names, ", "));
  group_.abort(text);
  throw Error(text, {.rank = group_.rank(), .call = "backward", .bucket = next_bucket_});
}

void Reducer::Impl::forget_backward() noexcept {
  in_backward_ = false;
  for (Bucket& bucket : buckets_) bucket.work = {};
}

Reducer::Reducer(std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options)
    : impl_(std::make_shared<Impl>(std::move(parameters), std::move(group), options)) {
  impl_->install_hooks();
}

Reducer::~Reducer() { impl_->remove_hooks(); }

void Reducer::set_synchronize(bool synchronize) noexcept { impl_->synchronize = synchronize; }

bool Reducer::synchronize() const noexcept { return impl_->synchronize; }

const std::vector<std::vector<std::size_t>>& Reducer::buckets() const noexcept { return impl_->plan; }

const std::optional<BackwardTrace>& Reducer::last_backward() const noexcept { return impl_->trace; }

}  // namespace ddpkit
