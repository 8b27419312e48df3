// Tier 1.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include <ddpkit/comm/timeline.h>
#include <ddpkit/parallel/reducer.h>

namespace ddpkit {

/// When a bucket was reduced.
struct BucketTiming {
  std::size_t bytes = 0, parameters = 0, sent_bytes = 0;           ///< See BucketStats.
  std::chrono::steady_clock::time_point ready, started, finished;  ///< See BucketStats.
};

/// A synchronised backward.
struct BackwardTrace {
  std::vector<BucketTiming> buckets;  ///< [bucket]
  /// When hooks of the gradients ran, and when all gradients were reduced.
  std::chrono::steady_clock::time_point first_gradient, last_gradient, end;
};

/// What averaged backwards did: numbers for stats(), events for the timeline. Not thread-safe.
class StepStats {
 public:
  using Clock = std::chrono::steady_clock;

  /// On a device the host runs ahead: its times are those at which work was queued.
  explicit StepStats(bool on_device) : on_device_(on_device) {}

  /// A backward has ended.
  void add(BackwardTrace trace);
  /// The backward has failed.
  void discard() noexcept { reached_output_ = {}; }
  std::uint64_t backwards() const noexcept { return backwards_; }
  DistributedDataParallelStats stats(int rebuilds) const;

  /// See Reducer::set_timeline().
  void set_timeline(std::optional<Timeline> timeline, std::uint64_t write_after);
  bool has_timeline() const noexcept { return timeline_.has_value(); }
  void note_output_reached();
  void record_wait(std::size_t bucket, Clock::time_point begin, Clock::time_point end) const;

 private:
  void record_step();

  bool on_device_;
  std::optional<BackwardTrace> last_;
  std::uint64_t backwards_ = 0;
  std::uint64_t bytes_ = 0, sent_bytes_ = 0;  ///< Over all averaged backwards, as the next two.
  Clock::duration communication_{}, hidden_{};
  std::optional<Timeline> timeline_;
  std::uint64_t write_timeline_after_ = 0;  ///< Backwards that are left to be recorded; 0: the caller writes it.
  Clock::time_point reached_output_;        ///< When backward came to an output of forward.
};

}  // namespace ddpkit
