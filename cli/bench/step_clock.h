// Tier 0: c10/core headers only.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <vector>

namespace ddpkit::bench {

/// Times consecutive steps: on the CPU by the host clock, on a GPU by events in its stream. The host can run ahead of
/// the GPU, as in training.
class StepClock {
 public:
  /// For `steps` steps in the current stream of `device`. Waits for the queued work, then starts the clock.
  StepClock(c10::Device device, int steps);
  /// Marks the end of a step's calls.
  void lap();
  /// Start of the first step in microseconds. All processes of the host share this clock.
  double start_us() const { return start_us_; }
  /// Waits for the device. Returns the time of each step in microseconds. [step]
  std::vector<double> us() const;

 private:
  c10::Device device_;
  double start_us_ = 0;
  std::vector<std::chrono::steady_clock::time_point> times_;  ///< On the CPU. [step + 1]
  std::vector<c10::Event> events_;                            ///< On a GPU. [step + 1]
};

/// Waits for the work queued in the current stream of `device`. Does nothing on the CPU.
void wait_for(c10::Device device);

}  // namespace ddpkit::bench
