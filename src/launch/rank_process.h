// Tier 0: the standard library only. The processes of the ranks.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <set>
#include <string>
#include <vector>

#include <ddpkit/launch/launch_options.h>

namespace ddpkit::launcher {

/// Returns the environment of rank `rank` of this host as "NAME=value": that of this process, then torchrun's
/// variables, then those of the options. `page`: descriptor of the rank's flight recorder. `pass`: descriptor of the
/// store's key; -1: no key. `replaces`: the process replaces a lost rank.
std::vector<std::string> rank_environment(const LaunchOptions& options, int rank, int port, int page, int pass,
                                          bool replaces = false);

/// Returns the name of the run: equal on all hosts, which share only the rendezvous address.
std::string run_name(const LaunchOptions& options, int port);

/// Parameters for the start of a rank's process.
struct RankStart {
  const std::vector<std::string>& command;
  const std::vector<std::string>& environment;  ///< "NAME=value"
  int in = -1, out = -1, err = -1;              ///< Descriptors; -1: those of this process.
  std::array<int, 2> inherited = {-1, -1};      ///< Further descriptors to inherit; -1: none.
  const std::vector<int>& cores;                ///< Empty: the cores of this process.
  /// ProcessReaper::descriptor() for a separate process group, which is killed when the process ends; -1: no such
  /// group.
  int reaper = -1;
};

/// Returns the process groups that have a running member.
std::set<pid_t> living_groups();

/// The process of one rank. The kernel kills it when the thread that started it ends.
class RankProcess {
 public:
  /// Throws InvalidArgument if the program cannot be started, Error if fork fails.
  explicit RankProcess(const RankStart& start);
  /// Kills the process if it still runs.
  ~RankProcess();
  RankProcess(RankProcess&& other) noexcept;
  RankProcess& operator=(RankProcess&& other) noexcept;

  pid_t pid() const noexcept { return pid_; }
  bool running() const noexcept { return running_; }
  /// Readable after the end; -1 on a kernel without pidfds.
  int descriptor() const noexcept { return pidfd_; }
  /// Returns true once, after the end. `signal`: the signal that killed it, or 0. The process stays a zombie until
  /// release(), so the kernel does not reuse its ID, which is also the ID of its group.
  bool has_ended(int& exit_code, int& signal) noexcept;
  /// Returns whether it is a zombie. Its group may have other members.
  bool holds_group() const noexcept { return !running_ && !released_; }
  /// Call after the end: the kernel may reuse the group's ID, and signal() does nothing.
  void release() noexcept;
  /// Sends a signal to the whole group, also after the process has ended.
  void signal(int number) const noexcept;

 private:
  pid_t pid_ = -1;
  int pidfd_ = -1;
  bool own_group_ = true;
  bool running_ = false;
  bool released_ = false;
};

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

}  // namespace ddpkit::launcher
