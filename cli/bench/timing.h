// Tier 0: the standard library only.
#pragma once

#include <chrono>
#include <functional>
#include <vector>

namespace ddpkit::bench {

inline double microseconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

/// How often a call is made; 0 chooses by time.
struct TimingOptions {
  int iterations = 0;
  int warmup = 0;
  int batch_us = 100;  ///< The clock is read after as many calls as take this long.
};

/// What the ranks that are timed together need from each other.
class Peers {
 public:
  virtual ~Peers() = default;
  virtual void barrier() = 0;
  /// Waits for what calls have only queued: on a GPU.
  virtual void finish() {}
  /// Rank 0's value.
  virtual double from_rank_zero(double value) = 0;
  /// Each element's largest over the ranks.
  virtual void max_over_ranks(std::vector<double>& values) = 0;
};

/// Microseconds of one `call`, which all ranks make together.
///
/// Calls follow each other without a barrier between, and the clock is read after each batch of them has finished, so
/// that reading it costs nothing even where a call takes less than a microsecond. A batch took what its slowest rank
/// took; the result is the median over the batches of their time a call. The same on every rank.
double median_us(Peers& peers, const std::function<void()>& call, const TimingOptions& options);

/// The middle one, or the mean of the two in the middle. Not of an empty vector.
double median(std::vector<double> values);

/// Cores that the calling thread may run on.
int usable_cores();

/// Puts the calling thread on a core of its own when there is one for each of `ranks`. Returns whether it did.
bool pin_to_core(int rank, int ranks);

}  // namespace ddpkit::bench
