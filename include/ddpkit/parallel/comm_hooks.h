// Tier 1: ATen/core/Tensor.h. Communication hooks. power_sgd.h has another hook.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ddpkit/comm/process_group.h>

namespace ddpkit {

/// A bucket of gradients that is ready to be reduced.
struct GradBucket {
  std::size_t index = 0;               ///< From 0, in the order of reduction. The same on all ranks.
  bool is_last = false;                ///< No bucket of this backward follows.
  at::Tensor buffer;                   ///< This rank's gradients of the bucket, flat: shape [numel].
  std::vector<at::Tensor> gradients;   ///< Views of the buffer, in the shapes of the parameters. [position]
  std::vector<at::Tensor> parameters;  ///< [position]
  std::vector<std::string> names;      ///< Names of the parameters. [position]
};

/// A reduction that a communication hook has started.
struct BucketReduction {
  Work work = {};  ///< The end of backward waits for it. May be empty.
  /// Called after `work` has completed, bucket by bucket, at the end of backward, on the stream of the hook. May call
  /// collectives. Returns the bucket's reduced gradients with the shape of the buffer and any floating type, or an
  /// undefined tensor if the result is in the buffer. May be empty.
  std::function<at::Tensor()> finish = {};
  /// Bytes that this rank passes to collectives for the bucket, including `finish`; for stats(). Empty: the buffer's.
  std::optional<std::size_t> sent_bytes = {};
};

/// Reduces gradients instead of the default all-reduce, like Python's torch.distributed.algorithms.ddp_comm_hooks.
/// Called once per bucket and backward, as soon as the bucket is full, on one of autograd's threads. On a GPU, the
/// current stream waits for the bucket's gradients. The hook must not wait for other ranks. The result must be the same
/// on all ranks, and should be the mean of the ranks' gradients.
using CommHook = std::function<BucketReduction(GradBucket& bucket)>;

}  // namespace ddpkit

/// The hooks of Python's torch.distributed.algorithms.ddp_comm_hooks:
///
///     ddp.register_comm_hook(ddpkit::comm_hooks::bf16_compress(ddp.group()));
namespace ddpkit::comm_hooks {

/// Returns the mean over `group`, with the same bits as DistributedDataParallel without a hook. A base for custom
/// hooks.
CommHook all_reduce(ProcessGroup group);

/// Sends gradients as float16: half the bytes of float32. Each rank's gradients are rounded to float16 and divided by
/// the world size, then summed. Gradients above 65,504 become infinite, below 6e-8 zero. For small gradients, scale the
/// loss (see optim::GradScaler). Of complex gradients, both parts are sent as float16.
CommHook fp16_compress(ProcessGroup group);

/// Same as fp16_compress(), with bfloat16. bfloat16 has float32's range and 8 significant bits.
CommHook bf16_compress(ProcessGroup group);

/// Passes the bucket to `hook` as float16 and casts the result back. fp16_compress_wrapper(all_reduce(group)) equals
/// fp16_compress(group), except for the order of division and rounding. Complex gradients are passed as real ones with
/// a last dimension of 2.
CommHook fp16_compress_wrapper(CommHook hook);

/// Same as fp16_compress_wrapper(), with bfloat16.
CommHook bf16_compress_wrapper(CommHook hook);

}  // namespace ddpkit::comm_hooks
