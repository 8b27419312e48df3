#include "timing.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cmath>

namespace ddpkit::bench {
namespace {

constexpr double kWarmupSeconds = 0.05;
constexpr double kTimedSeconds = 0.2;
constexpr int kMinBatches = 5;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

/// Calls until it is warm. Returns the seconds per call after warm-up, measured on rank 0.
double warm_up(Peers& peers, const std::function<void()>& call, int wanted) {
  double seconds_per_call = 0;
  double spent = 0;
  int done = 0;
  for (int burst = 1; wanted > 0 ? done < wanted : done < 2 || spent < kWarmupSeconds; burst *= 2) {
    if (wanted > 0) burst = std::min(burst, wanted - done);
    const double start = now();
    for (int i = 0; i < burst; ++i) call();
    peers.finish();
    const double seconds = peers.from_rank_zero(now() - start);
    seconds_per_call = seconds / burst;
    spent += seconds;
    done += burst;
  }
  return std::max(seconds_per_call, 1e-9);
}

}  // namespace

double median_us(Peers& peers, const std::function<void()>& call, const TimingOptions& options) {
  const double seconds_per_call = warm_up(peers, call, options.warmup);
  // Equal on all ranks: computed from rank 0's time.
  int calls_per_batch = static_cast<int>(std::ceil(options.batch_us * 1e-6 / seconds_per_call));
  int batches = std::max(kMinBatches, static_cast<int>(kTimedSeconds / (seconds_per_call * calls_per_batch)));
  if (options.iterations > 0) {
    calls_per_batch = std::min(calls_per_batch, options.iterations);
    batches = (options.iterations + calls_per_batch - 1) / calls_per_batch;
  }
  std::vector<double> us(static_cast<std::size_t>(batches));
  peers.barrier();
  double before = now();
  for (double& batch : us) {
    for (int i = 0; i < calls_per_batch; ++i) call();
    peers.finish();
    const double after = now();
    batch = (after - before) * 1e6 / calls_per_batch;
    before = after;
  }
  peers.max_over_ranks(us);
  return median(std::move(us));
}

double median(std::vector<double> values) {
  const std::size_t middle = values.size() / 2;
  std::sort(values.begin(), values.end());
  return values.size() % 2 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

namespace {

cpu_set_t usable_set() {
  cpu_set_t usable;
  CPU_ZERO(&usable);
  if (::sched_getaffinity(0, sizeof usable, &usable) != 0) CPU_ZERO(&usable);
  return usable;
}

}  // namespace

int usable_cores() {
  const cpu_set_t usable = usable_set();
  return std::max(1, CPU_COUNT(&usable));
}

bool pin_to_core(int rank, int ranks) {
  const cpu_set_t usable = usable_set();
  if (CPU_COUNT(&usable) < ranks) return false;
  for (int core = 0, seen = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &usable) || seen++ != rank) continue;
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(core, &own);
    return ::sched_setaffinity(0, sizeof own, &own) == 0;
  }
  return false;
}

}  // namespace ddpkit::bench
