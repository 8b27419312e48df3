// Tier 1. The implementation of Timeline.
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

/// Clock readings before and after one exchange. No rank leaves an exchange before all have entered it.
struct ClockReading {
  std::int64_t before_ns = 0;
  std::int64_t after_ns = 0;
};

/// The offset to add to a clock's readings to get the reference clock, and the maximum error.
struct ClockOffset {
  std::int64_t ns = 0;
  std::int64_t error_ns = 0;
};

/// Computes the offset of two clocks. No rank leaves an exchange before all have entered it, so each exchange bounds
/// the offset from both sides. The tightest bounds count. Readings are in the order of the exchanges.
ClockOffset clock_offset(const std::vector<ClockReading>& reference, const std::vector<ClockReading>& other);

/// Returns `text` as a JSON string with quotes.
std::string json_string(const std::string& text);

/// Details that the viewer shows for a selected event.
struct TimelineDetails {
  std::optional<std::uint64_t> step = {};
  std::optional<std::size_t> bytes = {};
  std::optional<std::size_t> parameters = {};
};

/// Records the events of one rank.
class TimelineRecorder {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr int kCompute = 0;
  static int bucket_track(std::size_t bucket) { return static_cast<int>(bucket) + 1; }

  /// Collective.
  TimelineRecorder(ProcessGroup group, std::string path, const TimelineOptions& options);

  /// Thread-safe.
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
  ClockOffset offset_;          ///< Relative to rank 0's clock.
  std::int64_t origin_ns_ = 0;  ///< Time 0 of the file, on rank 0's clock.
  mutable std::mutex mutex_;
  std::vector<Event> events_;
  std::size_t dropped_ = 0;
};

}  // namespace ddpkit
