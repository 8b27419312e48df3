// Tier 1.
#pragma once

#include <cstdint>
#include <optional>

#include <ddpkit/comm/trace.h>
#include <ddpkit/parallel/stats.h>

#include "parallel/ddp/backward.h"

namespace ddpkit {

/// Records averaged backwards: numbers for stats(), events for the timeline. Not thread-safe.
class StepStats {
 public:
  using Clock = Backward::Clock;

  /// `on_device`: the host runs ahead, so times are those of queuing the work.
  explicit StepStats(bool on_device) : on_device_(on_device) {}

  /// Adds a finished backward.
  void add(const Backward& backward);
  std::uint64_t backwards() const noexcept { return stats_.steps; }
  DistributedDataParallelStats stats(int rebuilds) const;

  /// `write_after`: number of backwards after which the timeline is written and removed; the same on all ranks. 0: the
  /// caller writes it.
  void set_timeline(std::optional<Timeline> timeline, std::uint64_t write_after);
  bool has_timeline() const noexcept { return timeline_.has_value(); }
  void record_wait(std::size_t bucket, Clock::time_point begin, Clock::time_point end) const;

 private:
  void record(const Backward& backward);

  bool on_device_;
  DistributedDataParallelStats stats_;
  std::optional<Timeline> timeline_;
  std::uint64_t write_timeline_after_ = 0;  ///< Backwards until the timeline is written; 0: the caller writes it.
};

}  // namespace ddpkit
