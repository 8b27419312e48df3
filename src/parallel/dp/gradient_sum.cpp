#include "parallel/dp/gradient_sum.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>

#include <ddpkit/error.h>
#include <ddpkit/parallel/bucket_plan.h>

#include "kernels/reduce.h"
#include "tensor/tensor_memory.h"

namespace ddpkit {

GradientSum::GradientSum(std::vector<Tensors> leaves, const ReplicaStreams& streams, std::size_t first_bucket_bytes,
                         std::size_t bucket_bytes)
    : streams_(streams), leaves_(std::move(leaves)), slots_(leaves_[0].size()), counting_(leaves_.size()) {
  std::vector<ParameterInfo> infos;
  for (const at::Tensor& leaf : leaves_[0])
    infos.push_back(
        {.numel = static_cast<std::size_t>(leaf.numel()), .dtype = leaf.scalar_type(), .device = leaf.device()});
  plan_ = plan_buckets(infos, first_bucket_bytes, bucket_bytes);
  buckets_ = std::vector<Bucket>(plan_.size());
  for (std::size_t b = 0; b < plan_.size(); ++b) {
    for (const std::size_t param : plan_[b]) slots_[param].bucket = b;
  }
  if (leaves_.size() == 1) return;
  for (std::size_t r = 0; r < leaves_.size(); ++r) {
    const ReplicaStreams::Scope scope(streams_, r);  // An accumulator runs on the stream of its creation.
    hooks_.emplace_back(leaves_[r], [this, r](std::size_t p, const at::Tensor& added) { on_gradient(r, p, added); });
  }
}

void GradientSum::begin(int active) {
  active_ = active;
  finished_ = 0;
  failed_ = false;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    buckets_[b].pending = plan_[b].size() * static_cast<std::size_t>(active);
    buckets_[b].ready = false;
  }
  for (Counting& counting : counting_) {
    counting.on = false;
    counting.fired.assign(slots_.size(), false);
  }
}

void GradientSum::take_part(int replica, const std::function<void()>& work) {
  Counting& counting = counting_[static_cast<std::size_t>(replica)];
  try {
    work();
  } catch (...) {
    counting.on = false;
    finish(true);
    throw;
  }
  counting.on = false;
  finish(false);
}

void GradientSum::on_gradient(std::size_t replica, std::size_t param, const at::Tensor& added) {
  Counting& counting = counting_[replica];
  if (!counting.on) return;
  if (counting.fired[param])
    throw Error(fmt::format(
        "the gradient of parameter {} came twice in one backward, as with a backward() inside a backward: DataParallel "
        "may have summed it before the second came",
        param));
  counting.fired[param] = true;
  note_gradient(replica, param, added);
  const std::size_t bucket = slots_[param].bucket;
  if (buckets_[bucket].pending.fetch_sub(1) == 1) {
    const std::lock_guard lock(mutex_);
    make_ready(bucket);
  }
  if (parts_left_ > 0) sum_part();
}

/// Call with the lock held.
void GradientSum::make_ready(std::size_t bucket) {
  buckets_[bucket].ready = true;
  for (const std::size_t param : plan_[bucket]) {
    Slot& slot = slots_[param];
    slot.gradients.clear();
    for (int r = 0; r < active_; ++r) {
      const at::Tensor& gradient = leaves_[static_cast<std::size_t>(r)][param].grad();
      if (gradient.defined()) slot.gradients.push_back(gradient);
    }
    slot.sum = slot.gradients.empty() ? at::Tensor() : slot.gradients[0];
  }
  sum_bucket(bucket);
}

void GradientSum::finish(bool failed) {
  std::unique_lock lock(mutex_);
  failed_ = failed_ || failed;
  if (++finished_ == active_ && !failed_) {
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      if (!buckets_[b].ready) make_ready(b);
    }
  }
  changed_.notify_all();
  while (!failed_) {
    changed_.wait(lock, [this] { return failed_ || parts_left_ > 0 || finished_ == active_; });
    if (failed_ || parts_left_ == 0) return;
    lock.unlock();
    sum_part();
    lock.lock();
  }
}

void GradientSum::drop() noexcept {
  for (Tensors& leaves : leaves_) {
    for (at::Tensor& leaf : leaves) leaf.mutable_grad().reset();
  }
  for (Slot& slot : slots_) {
    slot.gradients.clear();
    slot.sum.reset();
  }
}

at::Tensor sum_on_first(const std::vector<at::Tensor>& gradients, c10::Device device) {
  at::Tensor sum;
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.defined()) continue;
    const at::Tensor here = gradient.to(device, /*non_blocking=*/true);
    sum = !sum.defined() ? here : sum.is_sparse() && !here.is_sparse() ? at::add(here, sum) : at::add(sum, here);
  }
  return sum;
}

namespace {

/// Chunks of a few replicas' gradients fit into the private cache of a core.
constexpr std::int64_t kChunkBytes = 256 << 10;

/// Returns whether the vector kernel can sum the gradients.
bool has_sum_kernel(const std::vector<at::Tensor>& gradients) {
  const c10::ScalarType type = gradients[0].scalar_type();
  return (c10::isFloatingType(type) || c10::isComplexType(type)) && dtype_of(type) &&
         std::all_of(gradients.begin(), gradients.end(), [&](const at::Tensor& gradient) {
           return gradient.is_cpu() && same_memory_layout(gradient, gradients[0]);
         });
}

class CpuGradientSum final : public GradientSum {
 public:
  using GradientSum::GradientSum;

  void begin(int active) override {
    GradientSum::begin(active);
    sole_owner_.assign(slots_.size(), 0);
  }

  void drop() noexcept override {
    GradientSum::drop();
    chunks_.clear();
    parts_left_ = 0;
  }

 private:
  struct Piece {
    std::size_t param = 0;
    std::int64_t begin = 0;
    std::int64_t count = 0;  ///< Elements. 0: the whole gradient, with LibTorch's addition.
  };
  using Chunk = std::vector<Piece>;

  void note_gradient(std::size_t replica, std::size_t param, const at::Tensor& added) override {
    if (replica != 0) return;
    const at::Tensor& gradient = leaves_[0][param].grad();
    sole_owner_[param] = gradient.defined() && gradient.layout() == at::kStrided && is_sole_owner(gradient, added);
  }

  void sum_bucket(std::size_t bucket) override {
    Chunk chunk;
    std::int64_t chunk_bytes = 0;
    const auto close = [&] {
      if (!chunk.empty()) chunks_.push_back(std::exchange(chunk, {}));
      chunk_bytes = 0;
    };
    for (const std::size_t param : plan_[bucket]) {
      Slot& slot = slots_[param];
      if (slot.gradients.size() < 2) continue;
      if (!has_sum_kernel(slot.gradients)) {
        chunk.push_back({.param = param});
        close();
        continue;
      }
      // Uses the memory of replica 0's gradient, unless another parameter's gradient may share it.
      if (!slot.sum.is_same(leaves_[0][param].grad()) || !sole_owner_[param]) slot.sum = at::empty_like(slot.sum);
      const std::int64_t elements = slot.sum.numel();
      const auto element = static_cast<std::int64_t>(slot.sum.element_size());
      for (std::int64_t begin = 0; begin < elements;) {
        const std::int64_t count =
            std::min(elements - begin, std::max<std::int64_t>(1, (kChunkBytes - chunk_bytes) / element));
        chunk.push_back({.param = param, .begin = begin, .count = count});
        begin += count;
        chunk_bytes += count * element;
        if (chunk_bytes >= kChunkBytes) close();
      }
    }
    close();
    parts_left_ = chunks_.size();
    changed_.notify_all();
  }

  void sum_part() override {
    Chunk chunk;
    {
      const std::lock_guard lock(mutex_);
      if (chunks_.empty() || failed_) return;
      chunk = std::move(chunks_.front());
      chunks_.pop_front();
      parts_left_ = chunks_.size();
    }
    for (const Piece& piece : chunk) sum_piece(piece);
  }

  void sum_piece(const Piece& piece) {
    Slot& slot = slots_[piece.param];
    if (piece.count == 0) {
      const at::NoGradGuard no_grad;
      slot.sum = sum_on_first(slot.gradients, c10::kCPU);
      return;
    }
    const std::size_t offset = static_cast<std::size_t>(piece.begin) * slot.sum.element_size();
    std::vector<const void*> inputs;
    for (const at::Tensor& gradient : slot.gradients)
      inputs.push_back(static_cast<const char*>(gradient.const_data_ptr()) + offset);
    void* const output = static_cast<char*>(slot.sum.data_ptr()) + offset;
    kernels::reduce({.dtype = *dtype_of(slot.sum.scalar_type()),
                     .op = kernels::Reduction::kSum,
                     .numel = static_cast<std::size_t>(piece.count) * (slot.sum.is_complex() ? 2 : 1),
                     .inputs = inputs.data(),
                     .input_count = inputs.size(),
                     .outputs = &output,
                     .output_count = 1});
  }

  std::vector<std::uint8_t> sole_owner_;  ///< Whether replica 0's gradient is the sole owner of its memory. [param]
  std::deque<Chunk> chunks_;
};

}  // namespace

std::unique_ptr<GradientSum> make_cpu_gradient_sum(std::vector<GradientSum::Tensors> leaves,
                                                   const ReplicaStreams& streams, std::size_t first_bucket_bytes,
                                                   std::size_t bucket_bytes) {
  return std::make_unique<CpuGradientSum>(std::move(leaves), streams, first_bucket_bytes, bucket_bytes);
}

}  // namespace ddpkit
