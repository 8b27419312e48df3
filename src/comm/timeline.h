// Tier 0. Parts of Timeline.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

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

/// A timeline requested by environment variables.
struct TimelineRequest {
  std::string path;
  std::uint64_t steps = 100;  ///< Synchronized backwards to record before the file is written.
};

/// Reads DDPKIT_TIMELINE (a path) and DDPKIT_TIMELINE_STEPS. Only the first call in a process returns the request,
/// because several timelines would write to the same file. Throws InvalidArgument for an invalid number.
std::optional<TimelineRequest> take_timeline_request();

}  // namespace ddpkit
