// Tier 0: the standard library only.
#pragma once

#include <sys/types.h>

namespace ddpkit::launch {

/// A process that outlives the launcher and kills the remaining processes. The kernel kills a rank when its launcher
/// dies (PR_SET_PDEATHSIG), but not the child processes of the rank. Each rank has a separate process group. When the
/// launcher ends for any reason, the guardian kills all groups.
class Guardian {
 public:
  /// Throws Error if fork fails.
  Guardian();
  /// Does not kill the remaining groups.
  ~Guardian();
  Guardian(const Guardian&) = delete;
  Guardian& operator=(const Guardian&) = delete;

  void add(pid_t group) noexcept;
  void remove(pid_t group) noexcept;

 private:
  int socket_ = -1;
  pid_t pid_ = -1;
};

}  // namespace ddpkit::launch
