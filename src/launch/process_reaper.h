// Tier 0: the standard library only.
#pragma once

#include <sys/types.h>

namespace ddpkit::launcher {

/// A process that outlives the launcher and kills the remaining processes. The kernel kills a rank when its launcher
/// dies (PR_SET_PDEATHSIG), but not the child processes of the rank. Each rank has a separate process group. When the
/// launcher ends for any reason, the reaper kills all groups.
class ProcessReaper {
 public:
  /// Throws Error if fork fails.
  ProcessReaper();
  /// Does not kill the remaining groups.
  ~ProcessReaper();
  ProcessReaper(const ProcessReaper&) = delete;
  ProcessReaper& operator=(const ProcessReaper&) = delete;

  /// Adds the process group that this process leads. Call it between fork and exec. The launcher cannot add the group:
  /// it may be killed before it does, when the program runs already. `descriptor`: of the launcher's reaper.
  static void add_own_group(int descriptor) noexcept;
  int descriptor() const noexcept { return socket_; }
  void remove(pid_t group) noexcept { send(socket_, -group); }

 private:
  static void send(int descriptor, pid_t number) noexcept;

  int socket_ = -1;
  pid_t pid_ = -1;
};

}  // namespace ddpkit::launcher
