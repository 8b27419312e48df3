#include "comm/shm/process_watch.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "comm/timeout.h"

namespace ddpkit::shm {

ProcessWatch::ProcessWatch(int pid) : pid_(pid), fd_(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))) {}

ProcessWatch::~ProcessWatch() {
  if (fd_ >= 0) ::close(fd_);
}

ProcessWatch::ProcessWatch(ProcessWatch&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), fd_(std::exchange(other.fd_, -1)) {}

ProcessWatch& ProcessWatch::operator=(ProcessWatch&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(fd_, other.fd_);
  return *this;
}

bool ProcessWatch::alive() const noexcept {
  if (fd_ >= 0) {
    pollfd descriptor{fd_, POLLIN, 0};
    return ::poll(&descriptor, 1, 0) <= 0;  // An error of poll() does not mean that the process has ended.
  }
  // A kernel or a sandbox without pidfd.
  return pid_ > 0 && (::kill(pid_, 0) == 0 || errno == EPERM);
}

bool ProcessWatch::ends_within(std::chrono::milliseconds patience) const noexcept {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  return poll_until(deadline, [this] { return !alive(); });
}

}  // namespace ddpkit::shm
