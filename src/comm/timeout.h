// Tier 0: the standard library only.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace ddpkit {

/// Limits a timeout to 100 years, so that it can be added to a time point without overflow.
inline std::chrono::milliseconds clamp_timeout(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(24 * 365 * 100));
}

/// Returns the time until `deadline`, at least 1 ms.
inline std::chrono::milliseconds time_until(std::chrono::steady_clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  return std::max(left, std::chrono::milliseconds(1));
}

/// Calls `done` every millisecond until it returns true. Returns false if `deadline` passes before.
template <class Done>
bool poll_until(std::chrono::steady_clock::time_point deadline, const Done& done) {
  while (!done()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace ddpkit
