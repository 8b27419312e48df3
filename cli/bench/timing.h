// Tier 0: the standard library only.
#pragma once

#include <chrono>
#include <functional>
#include <vector>

namespace ddpkit::bench {

inline double microseconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

/// The number of calls; 0: chosen by time.
struct TimingOptions {
  int iterations = 0;
  int warmup = 0;
  int batch_us = 100;  ///< The clock is read once per batch of calls, which takes about this long.
};

/// The communication between the ranks that are timed together.
class Peers {
 public:
  virtual ~Peers() = default;
  virtual void barrier() = 0;
  /// Waits for queued calls on a GPU.
  virtual void finish() {}
  /// Returns rank 0's value on all ranks.
  virtual double from_rank_zero(double value) = 0;
  /// Replaces each element by the maximum over the ranks.
  virtual void max_over_ranks(std::vector<double>& values) = 0;
};

/// Returns the microseconds of one `call`. Collective: all ranks make the calls.
///
/// There is no barrier between calls. The clock is read after each batch of calls, so the cost of reading is negligible
/// even for calls below a microsecond. The time of a batch is that of its slowest rank. Returns the median over the
/// batches of the time per call, equal on all ranks.
double median_us(Peers& peers, const std::function<void()>& call, const TimingOptions& options);

/// Returns the median, for an even count the mean of the two middle values. `values` must not be empty.
double median(std::vector<double> values);

/// Returns the number of cores that the calling thread may run on.
int usable_cores();

/// Pins the calling thread to one core if there is at least one core per rank. Returns whether it did.
bool pin_to_core(int rank, int ranks);

}  // namespace ddpkit::bench
