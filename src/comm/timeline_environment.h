// Tier 0.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ddpkit {

/// A timeline requested by environment variables.
struct TimelineRequest {
  std::string path;
  std::uint64_t steps = 100;  ///< Synchronized backwards to record before the file is written.
};

/// Reads DDPKIT_TIMELINE (a path) and DDPKIT_TIMELINE_STEPS. Only the first call in a process returns the request,
/// because several timelines would write to the same file. Throws InvalidArgument for an invalid number.
std::optional<TimelineRequest> take_timeline_request();

}  // namespace ddpkit
