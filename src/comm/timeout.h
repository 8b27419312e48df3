// Tier 0: the standard library only.
#pragma once

#include <algorithm>
#include <chrono>

namespace ddpkit {

/// Limits a timeout to 100 years, so that it can be added to a time point without overflow.
inline std::chrono::milliseconds bounded(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(24 * 365 * 100));
}

}  // namespace ddpkit
