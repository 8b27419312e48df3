// Tier 0: c10/core headers only.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <vector>

namespace ddpkit::bench {

/// Times steps that follow each other: on the CPU by the host's clock; on a GPU by events in its queue, so that the
/// host runs ahead of it as it does in a training.
class StepClock {
 public:
  /// Of `steps` steps, whose work is in the current stream of `device`, if that has any. Waits for what is queued
  /// there, and begins.
  StepClock(c10::Device device, int steps);
  /// A step has been called for.
  void lap();
  /// When the first step began, by the clock that the host's processes share. Microseconds.
  double start_us() const { return start_us_; }
  /// What each step took, in microseconds. Waits for the device. [step]
  std::vector<double> us() const;

 private:
  c10::Device device_;
  double start_us_ = 0;
  std::vector<std::chrono::steady_clock::time_point> times_;  ///< On the CPU. [step + 1]
  std::vector<c10::Event> events_;                            ///< On a GPU. [step + 1]
};

/// Waits for all that is queued in the current stream of `device`, if that has any.
void wait_for(c10::Device device);

}  // namespace ddpkit::bench
