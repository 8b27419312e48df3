// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ddpkit/comm/process_group.h>
#include <ddpkit/parallel/comm_hooks.h>

namespace ddpkit {

/// Calls a communication hook of the program. The returned `finish` leaves the reduced gradients in the bucket's buffer
/// and returns nothing. An exception of hook or finish becomes an Error that names the bucket, and aborts the group,
/// unless other ranks caused the exception.
BucketReduction call_hook(const CommHook& hook, GradBucket bucket, const ProcessGroup& group);

}  // namespace ddpkit
