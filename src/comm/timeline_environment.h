// Tier 0.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ddpkit {

/// A timeline that nobody has to write code for.
struct TimelineRequest {
  std::string path;
  std::uint64_t steps = 100;  ///< Synchronised backwards to record; then it is written.
};

/// From DDPKIT_TIMELINE (a path) and DDPKIT_TIMELINE_STEPS, for the process's first caller; nothing for the others,
/// which would write to the same file. Throws InvalidArgument when the number is none.
std::optional<TimelineRequest> take_timeline_request();

}  // namespace ddpkit
