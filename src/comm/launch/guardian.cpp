#include "guardian.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include <ddpkit/comm/error.h>

namespace ddpkit::launch {
namespace {

constexpr int kMostGroups = 4096;
constexpr pid_t kDone = 0;

/// In the new process, which may call only what is safe between fork and exec. A positive number is a group to watch, a
/// negative one a group that has ended, kDone the end.
[[noreturn]] void watch(int pipe) {
  ::setsid();
  ::prctl(PR_SET_NAME, "ddpkit-guardian");
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGQUIT}) ::signal(number, SIG_IGN);
    // Nobody who waits for the end of the launcher's output must wait for this process, or share its other files.
#ifdef SYS_close_range
  if (pipe > 0) ::syscall(SYS_close_range, 0U, static_cast<unsigned>(pipe - 1), 0U);
  ::syscall(SYS_close_range, static_cast<unsigned>(pipe + 1), ~0U, 0U);
#endif
  static pid_t groups[kMostGroups];
  int count = 0;
  for (;;) {
    pid_t group = kDone;
    const auto got = ::read(pipe, &group, sizeof group);
    if (got < 0 && errno == EINTR) continue;
    if (got == sizeof group && group == kDone) ::_exit(0);
    if (got != sizeof group) break;  // The launcher has gone.
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

Guardian::Guardian() {
  int pipe[2];
  if (::pipe2(pipe, O_CLOEXEC) != 0) throw Error(fmt::format("no pipe: {}", std::strerror(errno)));
  pid_ = ::fork();
  if (pid_ == 0) {
    ::close(pipe[1]);
    watch(pipe[0]);
  }
  const int error = errno;
  ::close(pipe[0]);
  pipe_ = pipe[1];
  if (pid_ > 0) return;
  ::close(pipe_);
  throw Error(fmt::format("cannot start the launcher's guardian: {}", std::strerror(error)));
}

Guardian::~Guardian() {
  add(kDone);
  ::close(pipe_);
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void Guardian::add(pid_t group) noexcept { [[maybe_unused]] const auto written = ::write(pipe_, &group, sizeof group); }

void Guardian::remove(pid_t group) noexcept { add(-group); }

}  // namespace ddpkit::launch
