// Tier 1: ATen/core/Tensor.h. Ready communication hooks; power_sgd.h has one more.
#pragma once

#include <ddpkit/comm/process_group.h>
#include <ddpkit/parallel/comm_hook.h>

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
