#include "launch/rank_process.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/comm/environment.h>
#include <ddpkit/error.h>

#include "comm/store/store_key.h"
#include "comm/trace/event_ring.h"
#include "launch/process_reaper.h"

extern char** environ;

namespace ddpkit::launcher {
namespace {

/// Runs between fork and exec: must not allocate.
[[noreturn]] void become(const RankStart& start, char* const* arguments, char* const* environment, pid_t parent,
                         int report, const cpu_set_t& cores) {
  // The kernel kills the rank when the launcher ends. The next check covers a launcher that ended before this call.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);
  if (start.reaper >= 0) {
    ::setpgid(0, 0);
    ProcessReaper::add_own_group(start.reaper);
  } else {
    ::signal(SIGHUP, SIG_IGN);  // The launcher receives SIGHUP too and forwards it as SIGTERM.
  }
  if (start.in >= 0) ::dup2(start.in, STDIN_FILENO);
  if (start.out >= 0) ::dup2(start.out, STDOUT_FILENO);
  if (start.err >= 0) ::dup2(start.err, STDERR_FILENO);
  for (const int fd : start.inherited) {
    if (fd >= 0) ::fcntl(fd, F_SETFD, 0);
  }
  if (!start.cores.empty()) ::sched_setaffinity(0, sizeof cores, &cores);
  ::execvpe(arguments[0], arguments, environment);
  const int error = errno;
  [[maybe_unused]] const auto written = ::write(report, &error, sizeof error);
  ::_exit(127);
}

}  // namespace

std::string run_name(const LaunchOptions& options, int port) {
  if (!options.run_id.empty()) return options.run_id;
  return options.nodes > 1 ? fmt::format("nodes-{}", port) : fmt::format("local-{}", ::getpid());
}

std::vector<std::string> rank_environment(const LaunchOptions& options, int rank, int port, int page, int pass,
                                          bool replaces) {
  std::map<std::string, std::string> variables;
  for (char** at = environ; *at; ++at) {
    const std::string entry = *at;
    const auto equals = entry.find('=');
    if (equals != std::string::npos) variables[entry.substr(0, equals)] = entry.substr(equals + 1);
  }
  variables["RANK"] = std::to_string(options.node_rank * options.ranks + rank);
  variables["LOCAL_RANK"] = std::to_string(rank);
  variables["GROUP_RANK"] = std::to_string(options.node_rank);
  variables["WORLD_SIZE"] = std::to_string(options.nodes * options.ranks);
  variables["LOCAL_WORLD_SIZE"] = std::to_string(options.ranks);
  variables["MASTER_ADDR"] = options.master_addr;
  variables["MASTER_PORT"] = std::to_string(port);
  variables["TORCHELASTIC_RUN_ID"] = run_name(options, port);
  variables["TORCHELASTIC_RESTART_COUNT"] = std::to_string(options.restart_count);
  variables["TORCHELASTIC_MAX_RESTARTS"] = std::to_string(options.max_restarts);
  variables.erase("TORCHELASTIC_USE_AGENT_STORE");
  variables.erase(kReplacesVariable);
  if (replaces) variables[kReplacesVariable] = "1";
  variables[kEventPageVariable] = std::to_string(page);
  variables.erase(store::kKeyFileVariable);
  variables.erase(store::kKeyDescriptorVariable);
  if (pass >= 0) variables[store::kKeyDescriptorVariable] = std::to_string(pass);
  variables.emplace("OMP_NUM_THREADS", std::to_string(std::max(1, available_cores() / options.ranks)));
  for (const auto& [name, value] : options.environment) variables[name] = value;
  std::vector<std::string> entries;
  for (const auto& [name, value] : variables) entries.push_back(name + "=" + value);
  return entries;
}

std::set<pid_t> living_groups() {
  std::set<pid_t> groups;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename();
    if (name.empty() || name[0] < '0' || name[0] > '9') continue;
    std::string line;
    std::getline(std::ifstream(entry.path() / "stat"), line);
    char state = 0;
    int parent = 0, group = 0;
    // The program's name is in parentheses and may contain any character.
    const auto end_of_name = line.rfind(')');
    if (end_of_name != std::string::npos &&
        std::sscanf(line.c_str() + end_of_name + 1, " %c %d %d", &state, &parent, &group) == 3 && state != 'Z' &&
        state != 'X')
      groups.insert(group);
  }
  return groups;
}

RankProcess::RankProcess(const RankStart& start) : own_group_(start.reaper >= 0) {
  int report[2];
  if (::pipe2(report, O_CLOEXEC) != 0) throw Error(fmt::format("no pipe: {}", std::strerror(errno)));
  std::vector<char*> environment, arguments;
  for (const auto& entry : start.environment) environment.push_back(const_cast<char*>(entry.c_str()));
  environment.push_back(nullptr);
  for (const auto& argument : start.command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  cpu_set_t cores;
  CPU_ZERO(&cores);
  for (const int core : start.cores) CPU_SET(static_cast<std::size_t>(core), &cores);
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ == 0) become(start, arguments.data(), environment.data(), parent, report[1], cores);
  int error = errno;
  ::close(report[1]);
  if (pid_ < 0) {
    ::close(report[0]);
    throw Error(fmt::format("cannot start a process: {}", std::strerror(error)));
  }
  ssize_t got = 0;
  while ((got = ::read(report[0], &error, sizeof error)) < 0 && errno == EINTR) {
  }
  ::close(report[0]);
  if (got == sizeof error) {
    ::waitpid(pid_, nullptr, 0);
    throw InvalidArgument(fmt::format("cannot start \"{}\": {}", start.command[0], std::strerror(error)));
  }
  running_ = true;
  pidfd_ = static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0));
}

RankProcess::~RankProcess() {
  if (running_) signal(SIGKILL);
  release();
  if (pidfd_ >= 0) ::close(pidfd_);
}

RankProcess::RankProcess(RankProcess&& other) noexcept
    : pid_(other.pid_),
      pidfd_(std::exchange(other.pidfd_, -1)),
      own_group_(other.own_group_),
      running_(std::exchange(other.running_, false)),
      released_(std::exchange(other.released_, true)) {}

RankProcess& RankProcess::operator=(RankProcess&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(pidfd_, other.pidfd_);
  std::swap(own_group_, other.own_group_);
  std::swap(running_, other.running_);
  std::swap(released_, other.released_);
  return *this;
}

bool RankProcess::has_ended(int& exit_code, int& signal) noexcept {
  siginfo_t end{};
  if (!running_ || ::waitid(P_PID, static_cast<id_t>(pid_), &end, WEXITED | WNOHANG | WNOWAIT) != 0 ||
      end.si_pid != pid_)
    return false;
  (end.si_code == CLD_EXITED ? exit_code : signal) = end.si_status;
  running_ = false;
  if (!own_group_) release();
  return true;
}

void RankProcess::release() noexcept {
  if (std::exchange(released_, true)) return;
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
  running_ = false;
}

void RankProcess::signal(int number) const noexcept {
  if (released_) return;
  if (own_group_) {
    ::kill(-pid_, number);
  } else if (running_) {
    ::kill(pid_, number);
  }
}

EndOrder::EndOrder() : fd_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (fd_ < 0) throw Error(fmt::format("no epoll descriptor: {}", std::strerror(errno)));
}

EndOrder::~EndOrder() { ::close(fd_); }

void EndOrder::add(int pidfd, std::size_t rank) {
  if (pidfd < 0) return;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = rank;
  if (::epoll_ctl(fd_, EPOLL_CTL_ADD, pidfd, &event) != 0)
    throw Error(fmt::format("cannot watch the process of rank {}: {}", rank, std::strerror(errno)));
  ++count_;
}

void EndOrder::remove(int pidfd) noexcept {
  if (pidfd >= 0 && ::epoll_ctl(fd_, EPOLL_CTL_DEL, pidfd, nullptr) == 0) --count_;
}

std::vector<std::size_t> EndOrder::ended() const {
  // epoll returns descriptors in the order in which they became readable.
  std::vector<epoll_event> events(count_ + 1);
  const int found = ::epoll_wait(fd_, events.data(), static_cast<int>(events.size()), 0);
  std::vector<std::size_t> ranks;
  for (int i = 0; i < found; ++i)
    ranks.push_back(static_cast<std::size_t>(events[static_cast<std::size_t>(i)].data.u64));
  return ranks;
}

}  // namespace ddpkit::launcher
