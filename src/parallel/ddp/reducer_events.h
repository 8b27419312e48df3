// Tier 0. What DistributedDataParallel announces within join().
#pragma once

namespace ddpkit {

enum JoinEvent : int { kJoinBuffers, kJoinBucket, kJoinEndOfBackward };

}  // namespace ddpkit
