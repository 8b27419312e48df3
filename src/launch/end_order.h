// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <vector>

namespace ddpkit::launch {

/// Returns ended processes in the order of their ends. Needs pidfds.
class EndOrder {
 public:
  /// Throws Error if no descriptor is available.
  EndOrder();
  ~EndOrder();
  EndOrder(const EndOrder&) = delete;
  EndOrder& operator=(const EndOrder&) = delete;

  /// Throws Error if the kernel cannot watch the process. Like remove(), ignores a negative `pidfd`.
  void add(int pidfd, std::size_t rank);
  void remove(int pidfd) noexcept;
  /// Readable after a process has ended.
  int descriptor() const noexcept { return fd_; }
  /// Returns the ranks whose processes have ended and are not removed, in the order of their ends.
  std::vector<std::size_t> ended() const;

 private:
  int fd_ = -1;
  std::size_t count_ = 0;
};

}  // namespace ddpkit::launch
