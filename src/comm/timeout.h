// Tier 0: the standard library only.
#pragma once

#include <algorithm>
#include <chrono>

namespace ddpkit {

/// A timeout that can be added to a point in time: a hundred years at most, where more would wrap around.
inline std::chrono::milliseconds bounded(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(24 * 365 * 100));
}

}  // namespace ddpkit
