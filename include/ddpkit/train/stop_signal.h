// Tier 0: the standard library only.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

namespace ddpkit {
class ProcessGroup;
}

namespace ddpkit::train {

/// Turns SIGINT, SIGTERM and SIGHUP (Ctrl-C, preemption by a scheduler, a closed terminal; not under nohup) into a
/// request that all ranks see at the same step. Training can then end between two steps with a checkpoint. Only one
/// StopSignal per process at a time.
///
/// A second signal, more than half a second after the first, ends the process as without StopSignal.
class StopSignal {
 public:
  /// Installs the signal handlers. Every rank constructs one.
  explicit StopSignal(const ProcessGroup& group);
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  /// Returns whether training should stop: true on all ranks at the same call after any rank has received a signal.
  /// Collective: every rank calls it once per step. The ranks communicate a few times per second, not in each step.
  bool requested();

  /// Returns "stopped by SIGTERM after step 7; resume with --save-dir runs/1". Call it after requested() has returned
  /// true. `save_dir`: folder of the checkpoint; empty: there is none.
  std::string describe(std::int64_t step, const std::string& save_dir) const;

 private:
  std::unique_ptr<ProcessGroup> group_;
  int agreed_ = 0;                ///< The signal; 0: none.
  std::int64_t calls_left_ = 0;   ///< Calls until the ranks communicate again.
  std::int64_t interval_ = 1;     ///< Calls between two communications; all ranks use rank 0's.
  std::uint64_t generation_ = 0;  ///< Of the group at the last call.
  std::chrono::steady_clock::time_point last_talk_;
};

}  // namespace ddpkit::train
