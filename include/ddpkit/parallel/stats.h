// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddpkit {

/// One bucket in the last synchronized backward. Times are microseconds since the first gradient of that backward, on
/// the host's clock. On a GPU, the times are those of queueing the work, because reading the GPU's times would require
/// waiting.
struct BucketStats {
  std::size_t parameters = 0;  ///< Number of parameters in the bucket.
  std::size_t bytes = 0;       ///< Bytes of gradients.
  std::size_t sent_bytes = 0;  ///< Passed to collectives: less than `bytes` if a communication hook compresses.
  double ready_us = 0;         ///< The last gradient was ready.
  double started_us = 0;       ///< The reduction was passed to the backend.
  double done_us = 0;          ///< The reduction was seen to be complete. Checked at each gradient and at the end.
};

/// Statistics of DistributedDataParallel on this rank. A step is a synchronized backward. Only dense gradients count:
/// sparse gradients are gathered at the end of backward and are not in buckets.
struct DistributedDataParallelStats {
  std::uint64_t steps = 0;       ///< Synchronized backwards.
  int rebuilds = 0;              ///< Number of times that the buckets were rebuilt.
  std::uint64_t bytes = 0;       ///< Bytes of gradients over all steps.
  std::uint64_t sent_bytes = 0;  ///< Passed to collectives by this rank over all steps. 0 for one rank.
  double communication_us = 0;   ///< Time with a bucket in flight over all steps. 0 on a GPU: see BucketStats.
  double hidden_us = 0;          ///< The part of `communication_us` before the last gradient.

  std::vector<BucketStats> buckets = {};  ///< Last step, in the order of reduction. [bucket]
  double last_gradient_us = 0;            ///< Last step: time of the last gradient, since the first gradient.
  double end_us = 0;                      ///< Last step: all gradients were reduced, since the first gradient.

  /// Returns the share of the communication that overlapped with backward: 0 to 1. 0 before the first step.
  double hidden_share() const noexcept { return communication_us > 0 ? hidden_us / communication_us : 0; }
};

}  // namespace ddpkit
