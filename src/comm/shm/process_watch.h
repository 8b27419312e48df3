// Tier 0: the standard library only.
#pragma once

#include <chrono>

namespace ddpkit::shm {

/// Tells whether another process still runs. Holds a pidfd, so that a new process that gets the old one's id is not
/// mistaken for it.
class ProcessWatch {
 public:
  ProcessWatch() = default;
  explicit ProcessWatch(int pid);
  ~ProcessWatch();
  ProcessWatch(ProcessWatch&& other) noexcept;
  ProcessWatch& operator=(ProcessWatch&& other) noexcept;

  /// False once it has ended, also while its parent has not yet reaped it. A system call.
  bool alive() const noexcept;
  /// Whether it has ended, or does so within `patience`.
  bool ends_within(std::chrono::milliseconds patience) const noexcept;

 private:
  int pid_ = -1;
  int fd_ = -1;
};

}  // namespace ddpkit::shm
