#include <ddpkit/parallel/comm_hooks.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/view_as_real.h>

#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/error.h>

#include "parallel/ddp/comm_hooks.h"

namespace ddpkit {
namespace {

/// Identifies the hook in errors.
struct HookCall {
  std::size_t index;
  std::size_t parameters;
  std::string first, last;
  ProcessGroup group;
};

[[noreturn]] void fail(const HookCall& place, const char* what) {
  const std::string text = fmt::format(
      "the communication hook failed for bucket {} on rank {}, which holds the gradients of {} parameter{} ({}{}): {}",
      place.index, place.group.rank(), place.parameters, place.parameters == 1 ? "" : "s", place.first,
      place.parameters == 1 ? "" : " to " + place.last, what);
  place.group.abort(text);
  throw Error(text, {.rank = place.group.rank(), .call = "communication hook", .bucket = place.index});
}

template <class Call>
auto guarded(const HookCall& place, const Call& call) {
  try {
    return call();
  } catch (const PeerLost&) {
    throw;
  } catch (const Timeout&) {
    throw;
  } catch (const CollectiveMismatch&) {
    throw;
  } catch (const std::exception& error) {
    fail(place, error.what());
  }
}

}  // namespace

BucketReduction call_hook(const CommHook& hook, GradBucket bucket, const ProcessGroup& group) {
  const at::NoGradGuard no_grad;
  const HookCall place{bucket.index, bucket.names.size(), bucket.names.front(), bucket.names.back(), group};
  const at::Tensor buffer = bucket.buffer;
  BucketReduction pending = guarded(place, [&] { return hook(bucket); });
  if (!pending.finish) return pending;
  pending.finish = [place, buffer, finish = std::move(pending.finish)] {
    guarded(place, [&] {
      const at::Tensor reduced = finish();
      if (!reduced.defined() || reduced.is_same(buffer)) return;
      if (reduced.sizes() != buffer.sizes())
        throw InvalidArgument(fmt::format("its finish returned a tensor of [{}] where the bucket has [{}]",
                                          fmt::join(reduced.sizes(), ", "), fmt::join(buffer.sizes(), ", ")));
      buffer.copy_(reduced);
    });
    return at::Tensor();
  };
  return pending;
}

namespace comm_hooks {
namespace {

/// Returns a complex tensor as a real tensor with a last dimension of 2; other tensors unchanged.
at::Tensor as_real(const at::Tensor& tensor) { return tensor.is_complex() ? at::view_as_real(tensor) : tensor; }

CommHook compress(ProcessGroup group, at::ScalarType dtype) {
  return [group = std::move(group), dtype](GradBucket& bucket) -> BucketReduction {
    const at::Tensor buffer = as_real(bucket.buffer);
    // As in Python, divides first: the sum must not overflow.
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
  return [hook = std::move(hook), dtype](GradBucket& bucket) -> BucketReduction {
    const at::Tensor buffer = as_real(bucket.buffer);
    GradBucket shown = bucket;
    shown.buffer = buffer.to(dtype).view({-1});
    const std::int64_t moved = shown.buffer.storage_offset() - buffer.storage_offset();
    for (at::Tensor& gradient : shown.gradients) {
      const at::Tensor real = as_real(gradient);
      gradient = shown.buffer.as_strided(real.sizes(), real.strides(), real.storage_offset() + moved);
    }
    BucketReduction pending = hook(shown);
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
  return [group = std::move(group)](GradBucket& bucket) -> BucketReduction {
    return {.work = group.all_reduce_async(bucket.buffer, ReduceOp::kAvg)};
  };
}

CommHook fp16_compress(ProcessGroup group) { return compress(std::move(group), at::kHalf); }
CommHook bf16_compress(ProcessGroup group) { return compress(std::move(group), at::kBFloat16); }
CommHook fp16_compress_wrapper(CommHook hook) { return compress_wrapper(std::move(hook), at::kHalf); }
CommHook bf16_compress_wrapper(CommHook hook) { return compress_wrapper(std::move(hook), at::kBFloat16); }

}  // namespace comm_hooks
}  // namespace ddpkit
