#include "support/children.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <system_error>

#include <fmt/format.h>

namespace ddpkit::testing {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// ThreadSanitizer's runtime, and the emulator that runs tests for Arm, have one thread in every process, which they
/// restart after a fork.
#if defined(__SANITIZE_THREAD__) || defined(__aarch64__)
constexpr std::ptrdiff_t kThreads = 2;
#else
constexpr std::ptrdiff_t kThreads = 1;
#endif
constexpr milliseconds kGrace(1000);
/// Poll interval for ended children, if the kernel has no pidfd.
constexpr milliseconds kLook(20);

std::system_error last_error(const char* what) { return {errno, std::generic_category(), what}; }

class Child {
 public:
  Child(int index, const std::function<int(int)>& body, bool own_group) : own_group_(own_group) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw last_error("pipe2");
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ == 0) become(index, body, parent, ends[1]);
    const int error = errno;
    ::close(ends[1]);
    output_ = ends[0];
    if (pid_ < 0) {
      ::close(output_);
      throw std::system_error(error, std::generic_category(), "fork");
    }
    if (own_group_) ::setpgid(pid_, pid_);  // The child does the same: the first call counts.
    ::fcntl(output_, F_SETFL, O_NONBLOCK);
    ended_ = static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0));
  }
  ~Child() {
    if (running_) {
      signal(SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    if (ended_ >= 0) ::close(ended_);
    close_output();
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  bool running() const noexcept { return running_; }
  void signal(int number) const noexcept { ::kill(own_group_ ? -pid_ : pid_, number); }
  void add_to(std::vector<pollfd>& waits) const {
    if (running_) waits.push_back({ended_, POLLIN, 0});
    if (output_ >= 0) waits.push_back({output_, POLLIN, 0});
  }
  /// Reads the available output.
  void read() {
    char buffer[1 << 16];
    for (ssize_t got = 0; output_ >= 0;) {
      got = ::read(output_, buffer, sizeof buffer);
      if (got > 0) end.output.append(buffer, static_cast<std::size_t>(got));
      if (got == 0) close_output();
      if (got < 0 && errno != EINTR) return;
    }
  }
  /// Returns true once, when the child has ended.
  bool reap() {
    if (!running_ || ::waitpid(pid_, &end.status, WNOHANG) != pid_) return false;
    running_ = false;
    end.seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    if (own_group_) signal(SIGKILL);
    read();  // A process started by the child may hold the pipe open: does not wait for it.
    close_output();
    return true;
  }

  ChildEnd end;

 private:
  [[noreturn]] static void exit_with(int code) {
    std::cout.flush();
    std::cerr.flush();
    std::exit(code);
  }

  /// After this, exit() destroys only what this process has created. LibTorch destroys its tables of operators in 0.1
  /// s. Programs started by a test, and processes that a test forks, still do it.
  static void end_before_libraries() {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // These report at the end of exit().
    static pid_t process;
    process = ::getpid();
    ::on_exit(
        [](int code, void*) {
          if (::getpid() != process) return;
          std::cout.flush();
          std::cerr.flush();
          std::fflush(nullptr);
          ::_exit(code);
        },
        nullptr);
#endif
  }

  [[noreturn]] void become(int index, const std::function<int(int)>& body, pid_t parent, int output) const {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(127);
    if (own_group_) ::setpgid(0, 0);
    if (const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC); null >= 0) ::dup2(null, STDIN_FILENO);
    ::dup2(output, STDOUT_FILENO);
    ::dup2(output, STDERR_FILENO);
    end_before_libraries();
    try {
      exit_with(body(index));
    } catch (const std::exception& error) {
      std::cerr << error.what() << std::endl;
      exit_with(1);
    }
  }

  void close_output() {
    if (output_ >= 0) ::close(output_);
    output_ = -1;
  }

  bool own_group_;
  Clock::time_point start_ = Clock::now();
  pid_t pid_ = -1;
  int ended_ = -1;   ///< A pidfd; -1 if the kernel has none.
  int output_ = -1;  ///< The pipe; -1 after its end.
  bool running_ = true;
};

}  // namespace

std::string ChildEnd::describe() const {
  if (!WIFSIGNALED(status)) return fmt::format("exited with code {}", WEXITSTATUS(status));
  return fmt::format("was killed by signal {} ({})", WTERMSIG(status), ::strsignal(WTERMSIG(status)));
}

ChildrenResult run_children(int count, const std::function<int(int)>& body, const ChildrenOptions& options) {
  const std::filesystem::directory_iterator threads("/proc/self/task");
  if (const auto number = std::distance(begin(threads), end(threads)); number > kThreads)
    throw std::logic_error(fmt::format("{} threads run: fork before LibTorch or the test starts any", number));
  // Otherwise the children would write the buffer again.
  std::cout.flush();
  std::cerr.flush();
  std::fflush(nullptr);
  std::vector<std::unique_ptr<Child>> children;  // [child]
  for (int index = 0; index < count; ++index)
    children.push_back(std::make_unique<Child>(index, body, options.own_groups));

  ChildrenResult result;
  Clock::time_point stop_at = Clock::now() + options.time_limit;
  bool stopping = false;
  const auto signal_all = [&](int number) {
    for (const auto& child : children) {
      if (child->running()) child->signal(number);
    }
  };
  while (std::ranges::any_of(children, [](const auto& child) { return child->running(); })) {
    std::vector<pollfd> waits;
    for (const auto& child : children) child->add_to(waits);
    ::poll(waits.data(), waits.size(), static_cast<int>(kLook.count()));
    bool failed = false;
    for (const auto& child : children) {
      child->read();
      if (!child->reap()) continue;
      child->end.stopped = stopping;
      failed = failed || !child->end.ok();
    }
    if (Clock::now() > stop_at) {
      result.timed_out = result.timed_out || !stopping;
      stopping = true;
      signal_all(SIGKILL);
    } else if (failed && options.stop_on_failure && !stopping) {
      stopping = true;
      stop_at = std::min(stop_at, Clock::now() + kGrace);
      signal_all(SIGTERM);
    }
  }
  for (const auto& child : children) result.ends.push_back(std::move(child->end));
  return result;
}

}  // namespace ddpkit::testing
