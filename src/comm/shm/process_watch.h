// Tier 0: the standard library only.
#pragma once

#include <chrono>

namespace ddpkit::shm {

/// Checks whether another process still runs. Holds a pidfd, so a new process with the same process ID is not mistaken
/// for it.
class ProcessWatch {
 public:
  ProcessWatch() = default;
  explicit ProcessWatch(int pid);
  ~ProcessWatch();
  ProcessWatch(ProcessWatch&& other) noexcept;
  ProcessWatch& operator=(ProcessWatch&& other) noexcept;

  /// Returns false after the process has ended, also before its parent has reaped it. Makes a system call.
  bool alive() const noexcept;
  /// Returns whether the process has ended or ends within `patience`.
  bool ends_within(std::chrono::milliseconds patience) const noexcept;

 private:
  int pid_ = -1;
  int fd_ = -1;
};

}  // namespace ddpkit::shm
