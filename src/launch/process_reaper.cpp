#include "launch/process_reaper.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include <ddpkit/error.h>

namespace ddpkit::launcher {
namespace {

constexpr int kMostGroups = 4096;
constexpr pid_t kDone = 0;

/// Runs in the forked process: only async-signal-safe functions. A positive number is a process group to watch, a
/// negative number an ended group, kDone the end.
[[noreturn]] void watch(int socket) {
  ::setsid();
  ::prctl(PR_SET_NAME, "ddpkit-reaper");
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGQUIT}) ::signal(number, SIG_IGN);
    // Closes all files: an open stdout would block readers that wait for the end of the launcher's output.
#ifdef SYS_close_range
  if (socket > 0) ::syscall(SYS_close_range, 0U, static_cast<unsigned>(socket - 1), 0U);
  ::syscall(SYS_close_range, static_cast<unsigned>(socket + 1), ~0U, 0U);
#endif
  static pid_t groups[kMostGroups];
  int count = 0;
  for (;;) {
    pid_t group = kDone;
    const auto got = ::read(socket, &group, sizeof group);
    if (got < 0 && errno == EINTR) continue;
    if (got == sizeof group && group == kDone) ::_exit(0);
    if (got != sizeof group) break;  // The launcher has ended.
    if (group > 0) {
      if (count < kMostGroups) groups[count++] = group;
      continue;
    }
    for (int i = 0; i < count; ++i) {
      if (groups[i] == -group) groups[i--] = groups[--count];
    }
  }
  for (int i = 0; i < count; ++i) ::kill(-groups[i], SIGKILL);
  ::_exit(0);
}

}  // namespace

ProcessReaper::ProcessReaper() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw Error(fmt::format("no socket for the launcher's reaper: {}", std::strerror(errno)));
  pid_ = ::fork();
  if (pid_ == 0) {
    ::close(ends[1]);
    watch(ends[0]);
  }
  const int error = errno;
  ::close(ends[0]);
  socket_ = ends[1];
  if (pid_ > 0) return;
  ::close(socket_);
  throw Error(fmt::format("cannot start the launcher's reaper: {}", std::strerror(error)));
}

ProcessReaper::~ProcessReaper() {
  send(socket_, kDone);
  ::close(socket_);
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void ProcessReaper::add_own_group(int descriptor) noexcept { send(descriptor, ::getpid()); }

void ProcessReaper::send(int descriptor, pid_t number) noexcept {
  // The reaper may have been killed: the launch continues without it.
  [[maybe_unused]] const auto sent = ::send(descriptor, &number, sizeof number, MSG_NOSIGNAL);
}

}  // namespace ddpkit::launcher
