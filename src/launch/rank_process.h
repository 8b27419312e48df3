// Tier 0: the standard library only.
#pragma once

#include <sys/types.h>

#include <set>
#include <string>
#include <vector>

namespace ddpkit::launch {

/// Parameters for the start of a rank's process.
struct RankStart {
  const std::vector<std::string>& command;
  const std::vector<std::string>& environment;  ///< "NAME=value"
  int in = -1, out = -1, err = -1;              ///< Descriptors; -1: those of this process.
  int inherited = -1;                           ///< A further descriptor to inherit.
  const std::vector<int>& cores;                ///< Empty: the cores of this process.
  bool own_group = true;                        ///< A separate process group, which is killed when the process ends.
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
  RankProcess& operator=(RankProcess&&) = delete;

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

}  // namespace ddpkit::launch
