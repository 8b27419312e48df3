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

/// SIGINT, SIGTERM and SIGHUP (Ctrl-C, a scheduler that takes its machine back, a terminal that goes; under nohup not)
/// as a request that all ranks meet at the same step, so that training ends between two steps with its checkpoint in
/// order. One at a time in a process.
///
/// A second signal, more than half a second after the first, ends the process as it always would.
class StopSignal {
 public:
  /// From here on the process does not die of them. Every rank makes one.
  explicit StopSignal(const ProcessGroup& group);
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  /// Whether training is to end here: true on all ranks at the same call once any of them has had a signal. Collective:
  /// every rank calls it once a step. The ranks talk of it a few times a second, not each step.
  bool requested();

  /// "stopped by SIGTERM after step 7; the same command resumes from there", once requested() was true. `is_kept`:
  /// there is a checkpoint.
  std::string describe(std::int64_t step, bool is_kept) const;

 private:
  std::unique_ptr<ProcessGroup> group_;
  int agreed_ = 0;               ///< The signal.
  std::int64_t calls_left_ = 0;  ///< Until the ranks talk again.
  std::int64_t interval_ = 1;    ///< Calls between two talks; rank 0's counts.
  std::chrono::steady_clock::time_point last_talk_;
};

}  // namespace ddpkit::train
