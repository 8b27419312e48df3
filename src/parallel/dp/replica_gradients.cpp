#include "parallel/dp/replica_gradients.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include <ddpkit/error.h>
#include <ddpkit/parallel/bucket_plan.h>

#include "comm/backends/shm_arguments.h"
#include "kernels/reduce.h"
#include "parallel/dp/replica_streams.h"
#include "tensor/is_alone.h"

namespace ddpkit {
namespace {

/// Fits a core's own cache with as much from each of a few replicas.
constexpr std::int64_t kChunkBytes = 256 << 10;

/// Whether the vector kernel can sum them: dense, of one type, with elements in the same order.
bool plain(const std::vector<at::Tensor>& gradients) {
  const at::Tensor& first = gradients[0];
  const auto type = first.scalar_type();
  if (!at::isFloatingType(type) && !at::isComplexType(type)) return false;
  if (type != at::kFloat && type != at::kDouble && type != at::kHalf && type != at::kBFloat16 &&
      type != at::kComplexFloat && type != at::kComplexDouble)
    return false;
  return std::all_of(gradients.begin(), gradients.end(), [&](const at::Tensor& gradient) {
    return gradient.is_cpu() && gradient.layout() == at::kStrided && gradient.scalar_type() == type &&
           gradient.sizes() == first.sizes() && gradient.strides() == first.strides() &&
           gradient.is_non_overlapping_and_dense() && !gradient.is_conj() && !gradient.is_neg();
  });
}

}  // namespace

ReplicaGradients::ReplicaGradients(std::vector<std::vector<at::Tensor>> leaves, const ReplicaStreams& streams,
                                   std::size_t first_bucket_bytes, std::size_t bucket_bytes)
    : streams_(streams), leaves_(std::move(leaves)), slots_(leaves_[0].size()), counting_(leaves_.size()) {
  std::vector<ParameterInfo> infos;
  for (const at::Tensor& leaf : leaves_[0])
    infos.push_back(
        {.numel = static_cast<std::size_t>(leaf.numel()), .dtype = leaf.scalar_type(), .device = leaf.device()});
  plan_ = plan_buckets(infos, first_bucket_bytes, bucket_bytes);
  buckets_ = std::vector<Bucket>(plan_.size());
  for (std::size_t b = 0; b < plan_.size(); ++b) {
    for (const std::size_t param : plan_[b]) slots_[param].bucket = b;
    for (const auto& of_replica : leaves_) buckets_[b].writers.emplace_back(of_replica[plan_[b][0]].device());
  }
  if (leaves_.size() == 1) return;
  for (std::size_t r = 0; r < leaves_.size(); ++r) {
    const ReplicaStreams::Scope scope(streams_, r);  // An accumulator runs on the stream that was current.
    hooks_.emplace_back(leaves_[r], [this, r](std::size_t p, const at::Tensor& added) { on_gradient(r, p, added); });
  }
}

void ReplicaGradients::begin(int active) {
  active_ = active;
  finished_ = 0;
  failed_ = false;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    buckets_[b].pending = plan_[b].size() * static_cast<std::size_t>(active);
    buckets_[b].ready = false;
    for (StreamSet& writers : buckets_[b].writers) writers.clear();
  }
  for (Counting& counting : counting_) {
    counting.on = false;
    counting.fired.assign(slots_.size(), false);
  }
}

void ReplicaGradients::take_part(int replica, const std::function<void()>& work) {
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

/// In the replica's own thread, or autograd's of its device.
void ReplicaGradients::on_gradient(std::size_t replica, std::size_t param, const at::Tensor& added) {
  Counting& counting = counting_[replica];
  if (!counting.on) return;
  if (counting.fired[param])
    throw Error(fmt::format(
        "the gradient of parameter {} came twice in one backward, as with a backward() inside a backward: DataParallel "
        "may have summed it before the second came",
        param));
  counting.fired[param] = true;
  if (replica == 0 && !on_device()) {
    const at::Tensor& gradient = leaves_[0][param].grad();
    slots_[param].alone = gradient.defined() && gradient.layout() == at::kStrided && is_alone(gradient, added);
  }
  const std::size_t bucket = slots_[param].bucket;
  if (on_device()) {
    const std::lock_guard lock(mutex_);
    note_stream(replica, bucket);
  }
  if (buckets_[bucket].pending.fetch_sub(1) == 1) {
    const std::lock_guard lock(mutex_);
    make_ready(bucket);
  }
  if (chunk_count_ > 0) sum_one_chunk();
}

/// All replicas' gradients of this bucket are there, or never will be. Under the lock.
void ReplicaGradients::make_ready(std::size_t bucket) {
  buckets_[bucket].ready = true;
  Chunk chunk;
  std::int64_t chunk_bytes = 0;
  const auto close = [&] {
    if (!chunk.empty()) chunks_.push_back(std::exchange(chunk, {}));
    chunk_bytes = 0;
  };
  for (const std::size_t param : plan_[bucket]) {
    Slot& slot = slots_[param];
    slot.gradients.clear();
    for (int r = 0; r < active_; ++r) {
      const at::Tensor& gradient = leaves_[static_cast<std::size_t>(r)][param].grad();
      if (gradient.defined()) slot.gradients.push_back(gradient);
    }
    slot.sum = slot.gradients.empty() ? at::Tensor() : slot.gradients[0];
    if (slot.gradients.size() < 2 || on_device()) continue;
    if (!plain(slot.gradients)) {
      chunk.push_back({.param = param});
      close();
      continue;
    }
    // The gradient's own memory, unless another parameter's may lie there too.
    if (slot.gradients[0].unsafeGetTensorImpl() != leaves_[0][param].grad().unsafeGetTensorImpl() || !slot.alone)
      slot.sum = at::empty_like(slot.gradients[0]);
    const auto elements = static_cast<std::int64_t>(element_count(slot.sum));
    const auto element = static_cast<std::int64_t>(slot.sum.nbytes()) / std::max<std::int64_t>(elements, 1);
    for (std::int64_t begin = 0; begin < elements;) {
      const std::int64_t count =
          std::min(elements - begin, std::max<std::int64_t>(1, (kChunkBytes - chunk_bytes) / element));
      chunk.push_back({.param = param, .begin = begin, .count = count});
      begin += count;
      chunk_bytes += count * element;
      if (chunk_bytes >= kChunkBytes) close();
    }
  }
  if (on_device()) return sum_on_device(bucket);
  close();
  chunk_count_ = chunks_.size();
  changed_.notify_all();
}

void ReplicaGradients::sum_one_chunk() {
  Chunk chunk;
  {
    const std::lock_guard lock(mutex_);
    if (chunks_.empty() || failed_) return;
    chunk = std::move(chunks_.front());
    chunks_.pop_front();
    chunk_count_ = chunks_.size();
  }
  for (const Piece& piece : chunk) sum_piece(piece);
}

void ReplicaGradients::sum_piece(const Piece& piece) {
  Slot& slot = slots_[piece.param];
  if (piece.count == 0) {
    const at::NoGradGuard no_grad;
    at::Tensor sum = slot.sum;
    for (std::size_t i = 1; i < slot.gradients.size(); ++i) {
      const at::Tensor& other = slot.gradients[i];
      sum = sum.is_sparse() && !other.is_sparse() ? at::add(other, sum) : at::add(sum, other);
    }
    slot.sum = sum;
    return;
  }
  const auto offset = static_cast<std::size_t>(piece.begin) * slot.sum.nbytes() / element_count(slot.sum);
  std::vector<const void*> inputs;
  for (const at::Tensor& gradient : slot.gradients)
    inputs.push_back(static_cast<const char*>(gradient.const_data_ptr()) + offset);
  void* const output = static_cast<char*>(slot.sum.data_ptr()) + offset;
  kernels::reduce({.dtype = data_type(slot.sum),
                   .op = kernels::Reduction::kSum,
                   .numel = static_cast<std::size_t>(piece.count),
                   .inputs = inputs.data(),
                   .input_count = inputs.size(),
                   .outputs = &output,
                   .output_count = 1});
}

void ReplicaGradients::finish(bool failed) {
  std::unique_lock lock(mutex_);
  failed_ = failed_ || failed;
  if (++finished_ == active_ && !failed_) {
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      if (!buckets_[b].ready) make_ready(b);
    }
  }
  changed_.notify_all();
  while (!failed_) {
    changed_.wait(lock, [this] { return failed_ || !chunks_.empty() || finished_ == active_; });
    if (failed_ || chunks_.empty()) return;
    lock.unlock();
    sum_one_chunk();
    lock.lock();
  }
}

void ReplicaGradients::drop() noexcept {
  for (auto& leaves : leaves_) {
    for (at::Tensor& leaf : leaves) leaf.mutable_grad().reset();
  }
  for (Slot& slot : slots_) {
    slot.gradients.clear();
    slot.sum.reset();
  }
  chunks_.clear();
  chunk_count_ = 0;
}

}  // namespace ddpkit
