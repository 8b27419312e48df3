// Tier 0: the standard library only.
#pragma once

#include <string>
#include <vector>

#include <ddpkit/scaling/all_reduce.h>

namespace ddpkit::scaling {

/// A bucket of gradients in backward.
struct BucketProfile {
  double ready_us = 0;  ///< Time of its last gradient since the start of backward.
  double bytes = 0;     ///< Bytes of its gradients.
};

/// One training step on one device, measured or assumed.
struct StepProfile {
  double forward_us = 0;                    ///< Forward and loss.
  double backward_us = 0;                   ///< Backward.
  double other_us = 0;                      ///< The update and everything else between two steps: data, logging.
  std::vector<BucketProfile> buckets = {};  ///< In the order of reduction. [bucket]
  /// Measured times of whole steps on one device; their scatter predicts stragglers. The median corresponds to the step
  /// described by the fields above. Empty: no scatter.
  std::vector<double> steps_us = {};

  /// Returns the time of the step.
  double step_us() const noexcept { return forward_us + backward_us + other_us; }
};

/// Assumptions for a profile without measurements.
struct AssumedStep {
  double compute_us = 0;       ///< Forward and backward.
  double other_us = 0;         ///< Update and the rest.
  double parameter_bytes = 0;  ///< Bytes of all gradients.
  /// Share of backward in compute: backward has twice the matrix products of forward.
  double backward_share = 2.0 / 3;
  double bucket_bytes = 25 << 20;       ///< Default of DistributedDataParallel.
  double first_bucket_bytes = 1 << 20;  ///< Default of DistributedDataParallel.
};
/// Returns a profile whose gradients become ready evenly over backward. Throws std::invalid_argument for values that
/// are negative or not a number.
StepProfile assume_step(const AssumedStep& step);

/// How several devices execute one step.
struct StepOptions {
  /// True: the device computes during a collective (GPUs). False: collectives use the processor that computes (CPU
  /// ranks with shared memory), so there is no overlap.
  bool overlap = true;
  /// Factor by which compute is slower during a collective; 1: not slower. A GPU that uses c of its m multiprocessors
  /// for the collective has at least m / (m - c).
  double contention = 1;
  /// Each step waits for the slowest rank.
  bool stragglers = true;
  /// The ranks share the batch of one device (strong scaling): forward, backward and their scatter take 1 / ranks of
  /// the time, assuming that each device has the same utilization as with the whole batch. False: each rank has a batch
  /// of that size.
  bool fixed_global_batch = false;
  /// Each rank updates 1 / ranks of the weights (ShardedOptimizer), so `other_us` is divided by ranks. Reduce-scatter
  /// and all-gather transfer the same bytes as all-reduce.
  bool sharded_update = false;
  /// Each rank keeps 1 / ranks of the weights (FullyShardedDataParallel). Includes `sharded_update`. Forward gathers
  /// the weights, which takes half of an all-reduce. Backward gathers them again, and the reduce-scatter replaces the
  /// all-reduce, so backward transfers the same bytes.
  bool fully_sharded = false;
};

/// The parts of a step on several ranks, in microseconds.
struct StepPrediction {
  double us = 0;                ///< The step.
  double communication_us = 0;  ///< All buckets together.
  double exposed_us = 0;        ///< The part that did not overlap with forward or backward.
  double contention_us = 0;     ///< Slowdown of compute because of the overlap.
  double straggler_us = 0;      ///< Waiting for the slowest rank.
  std::string algorithm = {};   ///< Algorithm for the largest bucket.
};

/// Predicts a step. Buckets are reduced one after the other, each when it is ready and the previous one is done:
/// start_k = max(ready_k, end_(k-1)), end_k = start_k + all_reduce(bytes_k). Exposed is the time after the end of
/// backward (Li et al. 2020, arXiv 2006.15704, section 3.2). The step time of a rank is drawn from `steps_us`: the
/// median of the largest of N independent draws is their 0.5^(1/N) quantile.
StepPrediction predict_step(const StepProfile& profile, const AllReduceModel& all_reduce, int ranks,
                            const StepOptions& options = {});

}  // namespace ddpkit::scaling
