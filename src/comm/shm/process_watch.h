// Tier 0: the standard library only.
#pragma once

#include <cstdint>

namespace ddpkit::shm {

/// A page of a process in which the kernel notes the end of the process.
struct LifePage {
  int fd = -1;            ///< Descriptor in that process; -1: the kernel has no such page.
  std::uint64_t key = 0;  ///< Random number in the page: in another container, the process ID may be another process's.
};

/// Returns the page of this process. Starts one thread per process, which sleeps until the process ends.
LifePage life_page();

/// Checks whether another process still runs. Holds a pidfd, so a new process with the same process ID is not mistaken
/// for it.
class ProcessWatch {
 public:
  ProcessWatch() = default;
  /// `page`: life_page() of that process. With it, the end is known before the kernel has freed the memory of the
  /// process, which takes 0.2 s per GiB.
  explicit ProcessWatch(int pid, LifePage page = {});
  ~ProcessWatch();
  ProcessWatch(ProcessWatch&& other) noexcept;
  ProcessWatch& operator=(ProcessWatch&& other) noexcept;

  /// Returns false after the process has ended, also before its parent has reaped it. Makes a system call, except with
  /// a page.
  bool alive() const noexcept;

 private:
  void unmap() noexcept;

  int pid_ = -1;
  int fd_ = -1;
  const void* page_ = nullptr;  ///< nullptr: no page.
};

}  // namespace ddpkit::shm
