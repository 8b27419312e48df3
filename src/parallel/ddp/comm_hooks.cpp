#include <ddpkit/parallel/comm_hooks.h>

#include <ATen/ops/view_as_real.h>

#include <utility>

#include <ddpkit/error.h>

namespace ddpkit::comm_hooks {
namespace {

/// A complex tensor as a real one with a last dimension of 2; others as they are.
at::Tensor as_real(const at::Tensor& tensor) { return tensor.is_complex() ? at::view_as_real(tensor) : tensor; }

CommHook compress(ProcessGroup group, at::ScalarType dtype) {
  return [group = std::move(group), dtype](GradBucket& bucket) -> PendingReduction {
    const at::Tensor buffer = as_real(bucket.buffer);
    // Division first, as in Python: the sum must not overflow.
    const at::Tensor compressed = buffer.to(dtype).div_(group.world_size());
    return {.work = group.all_reduce_async(compressed),
            .finish =
                [buffer, compressed] {
                  if (!compressed.is_same(buffer)) buffer.copy_(compressed);
                  return at::Tensor();
                },
            .sent_bytes = compressed.nbytes()};
  };
}

CommHook compress_wrapper(CommHook hook, at::ScalarType dtype) {
  if (!hook) throw InvalidArgument("there is no communication hook to compress for: the one given is empty");
  return [hook = std::move(hook), dtype](GradBucket& bucket) -> PendingReduction {
    const at::Tensor buffer = as_real(bucket.buffer);
    GradBucket shown = bucket;
    shown.buffer = buffer.to(dtype).view({-1});
    const std::int64_t moved = shown.buffer.storage_offset() - buffer.storage_offset();
    for (at::Tensor& gradient : shown.gradients) {
      const at::Tensor real = as_real(gradient);
      gradient = shown.buffer.as_strided(real.sizes(), real.strides(), real.storage_offset() + moved);
    }
    PendingReduction pending = hook(shown);
    return {.work = std::move(pending.work),
            .finish =
                [buffer, half = shown.buffer, finish = std::move(pending.finish)] {
                  at::Tensor reduced = finish ? finish() : at::Tensor();
                  if (!reduced.defined()) reduced = half;
                  if (reduced.const_data_ptr() != buffer.const_data_ptr()) buffer.copy_(reduced.view_as(buffer));
                  return at::Tensor();
                },
            .sent_bytes = pending.sent_bytes.value_or(shown.buffer.nbytes())};
  };
}

}  // namespace

CommHook all_reduce(ProcessGroup group) {
  return [group = std::move(group)](GradBucket& bucket) -> PendingReduction {
    return {.work = group.all_reduce_async(bucket.buffer, ReduceOp::kAvg)};
  };
}

CommHook fp16_compress(ProcessGroup group) { return compress(std::move(group), at::kHalf); }
CommHook bf16_compress(ProcessGroup group) { return compress(std::move(group), at::kBFloat16); }
CommHook fp16_compress_wrapper(CommHook hook) { return compress_wrapper(std::move(hook), at::kHalf); }
CommHook bf16_compress_wrapper(CommHook hook) { return compress_wrapper(std::move(hook), at::kBFloat16); }

}  // namespace ddpkit::comm_hooks
