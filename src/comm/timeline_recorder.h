// Tier 1. What a Timeline holds.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/comm/timeline.h>

namespace ddpkit {

/// What was read from a clock before and after one exchange that no rank leaves before all have entered.
struct ClockReading {
  std::int64_t before_ns = 0;
  std::int64_t after_ns = 0;
};

/// What to add to a clock's readings to get the reference clock's, and how far off that may be.
struct ClockOffset {
  std::int64_t ns = 0;
  std::int64_t error_ns = 0;
};

/// Nobody leaves an exchange before all have entered it: so each exchange bounds the offset from both sides, and the
/// tightest bounds over all of them count. Readings in the order of the exchanges.
ClockOffset clock_offset(const std::vector<ClockReading>& reference, const std::vector<ClockReading>& other);

/// `text` as a JSON string, in its quotes.
std::string json_string(const std::string& text);

/// What an event shows when it is clicked on.
struct TimelineDetails {
  std::optional<std::uint64_t> step = {};
  std::optional<std::size_t> bytes = {};
  std::optional<std::size_t> parameters = {};
};

/// Of one rank.
class TimelineRecorder {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr int kCompute = 0;
  static int bucket_track(std::size_t bucket) { return static_cast<int>(bucket) + 1; }

  /// Collective.
  TimelineRecorder(ProcessGroup group, std::string path, const TimelineOptions& options);

  /// From any thread.
  void add(std::string name, int track, Clock::time_point begin, Clock::time_point end,
           const TimelineDetails& details = {});
  void write();
  std::size_t events() const;
  std::size_t dropped() const;

 private:
  struct Event {
    std::string name;
    int track = 0;
    Clock::time_point begin, end;
    TimelineDetails details;
  };

  void align_clocks();
  void check_writable() const;
  std::string render() const;

  ProcessGroup group_;
  std::string path_;
  TimelineOptions options_;
  ClockOffset offset_;          ///< To rank 0's clock.
  std::int64_t origin_ns_ = 0;  ///< On rank 0's clock: what the file calls 0.
  mutable std::mutex mutex_;
  std::vector<Event> events_;
  std::size_t dropped_ = 0;
};

}  // namespace ddpkit
