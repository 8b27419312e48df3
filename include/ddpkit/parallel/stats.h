// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddpkit {

/// One bucket in the last synchronised backward. Times are microseconds since that backward's first gradient, by the
/// host's clock: on a GPU, which lags behind the host, they say when work was queued, and nothing is waited for to know
/// more.
struct BucketStats {
  std::size_t parameters = 0;  ///< Whose gradients it holds.
  std::size_t bytes = 0;       ///< Of gradients.
  std::size_t sent_bytes = 0;  ///< Handed to collectives: fewer than `bytes` where a communication hook compresses.
  double ready_us = 0;         ///< Its last gradient was there.
  double started_us = 0;       ///< Its reduction was handed to the backend.
  double done_us = 0;          ///< Its reduction was seen to be over: looked for at each gradient and at the end.
};

/// What DistributedDataParallel has done so far, on this rank. A step is a synchronised backward. Dense gradients only:
/// sparse ones are gathered when backward ends, and belong to no bucket.
struct DistributedDataParallelStats {
  std::uint64_t steps = 0;       ///< Synchronised backwards.
  int rebuilds = 0;              ///< How often the buckets were laid out anew.
  std::uint64_t bytes = 0;       ///< Of gradients, over all steps.
  std::uint64_t sent_bytes = 0;  ///< Handed to collectives by this rank, over all steps. 0 in a world of one.
  /// Time in which a bucket was under way, over all steps, and the part of it that lies before the last gradient. 0 on
  /// a GPU: see BucketStats.
  double communication_us = 0;
  double hidden_us = 0;

  std::vector<BucketStats> buckets = {};  ///< Of the last step, in the order they are reduced. [bucket]
  double last_gradient_us = 0;            ///< Of the last step: since its first gradient.
  double end_us = 0;                      ///< All gradients were reduced.

  /// Of the communication, the share that backward hid: 0 to 1. 0 before the first step.
  double hidden_share() const noexcept { return communication_us > 0 ? hidden_us / communication_us : 0; }
};

}  // namespace ddpkit
