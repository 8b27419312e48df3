// Tier 1: ATen/core/Tensor.h. Communication hooks, and ready ones; power_sgd.h has one more.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ddpkit/comm/process_group.h>

namespace ddpkit {

/// A bucket of gradients whose turn it is to be reduced.
struct GradBucket {
  std::size_t index = 0;  ///< From 0, in the order buckets are reduced: the same on all ranks.
  bool is_last = false;
  at::Tensor buffer;                   ///< All of the bucket's gradients of this rank, flat: shape [numel].
  std::vector<at::Tensor> gradients;   ///< Each on its part of the buffer, in its parameter's shape. [position]
  std::vector<at::Tensor> parameters;  ///< [position]
  std::vector<std::string> names;      ///< Of the parameters. [position]
};

/// What a communication hook has begun.
struct PendingReduction {
  Work work = {};  ///< Waited for at the end of backward. May be empty.
  /// Called when `work` is over, bucket by bucket, at the end of backward, on the stream on which the hook ran; may
  /// communicate. Returns the bucket's reduced gradients, the buffer's shape and any floating type, or an undefined
  /// tensor when they are in the buffer. May be empty.
  std::function<at::Tensor()> finish = {};
  /// What this rank hands to collectives for the bucket, `finish` included, in bytes: for stats(). Empty: the buffer's.
  std::optional<std::size_t> sent_bytes = {};
};

/// Reduces gradients in place of the all-reduce: torch.distributed.algorithms.ddp_comm_hooks of Python, in C++. Called
/// once a bucket and backward as soon as the bucket is full, on a thread of autograd's and, on a GPU, a stream that
/// waits for the bucket's gradients; it must not wait for other ranks. What ends up in the bucket has to be the same on
/// all ranks, and should be the mean of the ranks' gradients.
using CommHook = std::function<PendingReduction(GradBucket& bucket)>;

}  // namespace ddpkit

/// The hooks of Python's torch.distributed.algorithms.ddp_comm_hooks:
///
///     ddp.register_comm_hook(ddpkit::comm_hooks::bf16_compress(ddp.group()));
namespace ddpkit::comm_hooks {

/// The mean over `group`, to the bit what DistributedDataParallel does without a hook: something for a hook of one's
/// own to build on.
CommHook all_reduce(ProcessGroup group);

/// Sends gradients as float16: half the bytes of float32. Each rank's gradients are rounded to float16 and divided by
/// the world size, then summed. Gradients beyond 65,504 become infinite, those below 6e-8 zero: scale the loss (see
/// optim::GradScaler) where they are small. Of complex gradients both parts are sent so.
CommHook fp16_compress(ProcessGroup group);

/// The same with bfloat16, which has float32's range and 8 significant bits.
CommHook bf16_compress(ProcessGroup group);

/// `hook` is shown the bucket in float16 instead, and what it returns is cast back: fp16_compress(group) is
/// fp16_compress_wrapper(all_reduce(group)) but for the order of division and rounding. Complex gradients are shown as
/// real ones with a last dimension of 2.
CommHook fp16_compress_wrapper(CommHook hook);

/// The same with bfloat16.
CommHook bf16_compress_wrapper(CommHook hook);

}  // namespace ddpkit::comm_hooks
