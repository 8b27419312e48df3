// Tier 1.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include <ddpkit/comm/timeline.h>
#include <ddpkit/parallel/stats.h>

namespace ddpkit {

/// Times of a bucket's reduction.
struct BucketTiming {
  std::size_t bytes = 0, parameters = 0, sent_bytes = 0;           ///< See BucketStats.
  std::chrono::steady_clock::time_point ready, started, finished;  ///< See BucketStats.
};

/// A synchronized backward.
struct BackwardTrace {
  std::vector<BucketTiming> buckets;  ///< [bucket]
  /// Times of the first and last gradient hook, and the time when all gradients were reduced.
  std::chrono::steady_clock::time_point first_gradient, last_gradient, end;
};

/// Records averaged backwards: numbers for stats(), events for the timeline. Not thread-safe.
class StepStats {
 public:
  using Clock = std::chrono::steady_clock;

  /// `on_device`: the host runs ahead, so times are those of queuing the work.
  explicit StepStats(bool on_device) : on_device_(on_device) {}

  /// Adds a finished backward.
  void add(BackwardTrace trace);
  /// Drops a failed backward.
  void discard() noexcept { reached_output_ = {}; }
  std::uint64_t backwards() const noexcept { return backwards_; }
  DistributedDataParallelStats stats(int rebuilds) const;

  /// `write_after`: number of backwards after which the timeline is written and removed; the same on all ranks. 0: the
  /// caller writes it.
  void set_timeline(std::optional<Timeline> timeline, std::uint64_t write_after);
  bool has_timeline() const noexcept { return timeline_.has_value(); }
  void note_output_reached();
  void record_wait(std::size_t bucket, Clock::time_point begin, Clock::time_point end) const;

 private:
  void record_step();

  bool on_device_;
  std::optional<BackwardTrace> last_;
  std::uint64_t backwards_ = 0;
  std::uint64_t bytes_ = 0, sent_bytes_ = 0;  ///< These members are sums over all averaged backwards.
  Clock::duration communication_{}, hidden_{};
  std::optional<Timeline> timeline_;
  std::uint64_t write_timeline_after_ = 0;  ///< Backwards until the timeline is written; 0: the caller writes it.
  Clock::time_point reached_output_;        ///< Time when backward reached an output of the forward pass.
};

}  // namespace ddpkit
