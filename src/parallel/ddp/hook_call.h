// Tier 1. Calling a communication hook that somebody else has written.
#pragma once

#include <ddpkit/parallel/comm_hook.h>

namespace ddpkit {

/// Calls the hook. The `finish` that comes back leaves the reduced gradients in the bucket's buffer and returns
/// nothing. What hook or finish throws, unless it is about other ranks, becomes an Error that names the bucket, and is
/// told to the other ranks, which would wait for this one.
PendingReduction call_hook(const CommHook& hook, GradBucket bucket, const ProcessGroup& group);

}  // namespace ddpkit
