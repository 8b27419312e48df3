// Tier 0: the standard library only.
#pragma once

#include <sys/types.h>

namespace ddpkit::launch {

/// A process that outlives this one only to end what it leaves: the kernel kills a rank whose launcher dies
/// (PR_SET_PDEATHSIG), but not what that rank has started. Each rank has a process group of its own; when this process
/// has gone, however that came, all groups are killed.
class Guardian {
 public:
  /// Throws Error when no process can be had.
  Guardian();
  /// The groups that are left are not touched: they have been seen to.
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
