// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <vector>

namespace ddpkit::launch {

/// Reports which processes have ended, in the order in which they ended. Needs pidfds.
class EndOrder {
 public:
  /// Throws Error without a descriptor.
  EndOrder();
  ~EndOrder();
  EndOrder(const EndOrder&) = delete;
  EndOrder& operator=(const EndOrder&) = delete;

  /// Throws Error if the kernel cannot watch the process. A negative `pidfd` is ignored, as in the next.
  void add(int pidfd, std::size_t rank);
  void remove(int pidfd) noexcept;
  /// Readable when a process has ended.
  int descriptor() const noexcept { return fd_; }
  /// Ranks whose processes have ended and are not removed, the first to end first.
  std::vector<std::size_t> ended() const;

 private:
  int fd_ = -1;
  std::size_t count_ = 0;
};

}  // namespace ddpkit::launch
