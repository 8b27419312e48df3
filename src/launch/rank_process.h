// Tier 0: the standard library only.
#pragma once

#include <sys/types.h>

#include <set>
#include <string>
#include <vector>

namespace ddpkit::launch {

/// What a rank's process is started with.
struct RankStart {
  const std::vector<std::string>& command;
  const std::vector<std::string>& environment;  ///< "NAME=value"
  int in = -1, out = -1, err = -1;              ///< Descriptors; -1: this process's.
  int inherited = -1;                           ///< A further descriptor that it keeps.
  const std::vector<int>& cores;                ///< Empty: those of this process.
  bool own_group = true;                        ///< A process group of its own, which ends with it.
};

/// Process groups that have a member which has not ended.
std::set<pid_t> living_groups();

/// One rank's process. It dies with the thread that has started it.
class RankProcess {
 public:
  /// Throws InvalidArgument when the program cannot be started, Error when no process can be had.
  explicit RankProcess(const RankStart& start);
  /// Kills it if it still runs.
  ~RankProcess();
  RankProcess(RankProcess&& other) noexcept;
  RankProcess& operator=(RankProcess&&) = delete;

  pid_t pid() const noexcept { return pid_; }
  bool running() const noexcept { return running_; }
  /// Readable when it has ended; -1 where the kernel has no such thing.
  int descriptor() const noexcept { return pidfd_; }
  /// True once, when it has ended; `signal`: 0, or the one that killed it. It stays a zombie until release(), so that
  /// the kernel gives its number, which is its group's, to no other process.
  bool has_ended(int& exit_code, int& signal) noexcept;
  /// Whether it is a zombie. Its group may have other members.
  bool holds_group() const noexcept { return !running_ && !released_; }
  /// After its end: the group's number is free, and signal() does nothing.
  void release() noexcept;
  /// To its whole group, also when it has ended itself.
  void signal(int number) const noexcept;

 private:
  pid_t pid_ = -1;
  int pidfd_ = -1;
  bool own_group_ = true;
  bool running_ = false;
  bool released_ = false;
};

}  // namespace ddpkit::launch
