// Tier 0: the standard library only.
#pragma once

#include <string>
#include <vector>

#include <ddpkit/scaling/all_reduce.h>

namespace ddpkit::scaling {

/// A bucket of gradients as backward makes it.
struct BucketProfile {
  double ready_us = 0;  ///< When its last gradient is there, since backward began.
  double bytes = 0;
};

/// One training step on one device, measured or assumed.
struct StepProfile {
  double forward_us = 0;
  double backward_us = 0;
  double other_us = 0;                      ///< The update, and whatever else is between two steps: data, logging.
  std::vector<BucketProfile> buckets = {};  ///< In the order in which they are reduced. [bucket]
  /// Times of whole steps of one device as they were measured, for how much they scatter; empty: they do not. Their
  /// median stands for the step that the fields above describe.
  std::vector<double> steps_us = {};

  double step_us() const noexcept { return forward_us + backward_us + other_us; }
};

/// Of a profile nobody has measured.
struct AssumedStep {
  double compute_us = 0;       ///< Forward and backward.
  double other_us = 0;         ///< Update and the rest.
  double parameter_bytes = 0;  ///< Of all gradients.
  /// Of compute, backward's share: twice the products of forward.
  double backward_share = 2.0 / 3;
  double bucket_bytes = 25 << 20;  ///< DistributedDataParallel's defaults.
  double first_bucket_bytes = 1 << 20;
};
/// Gradients become ready evenly over backward. Throws std::invalid_argument for what is negative or not a number.
StepProfile assume_step(const AssumedStep& step);

/// How several devices share one step.
struct StepOptions {
  /// True: the device computes while a collective is under way (GPUs). False: collectives take the processor that
  /// computes (CPU ranks on shared memory), and nothing is hidden.
  bool overlap = true;
  /// How much longer compute takes while a collective is under way; 1: not at all. A GPU that gives c of its m
  /// multiprocessors to the collective takes at least m / (m - c).
  double contention = 1;
  /// Each step waits for the slowest rank.
  bool stragglers = true;
  /// The ranks share one device's batch (strong scaling): forward, backward and their scatter take 1 / ranks of the
  /// time, as if each device were as busy with its part as with the whole. False: each rank has such a batch of its
  /// own.
  bool fixed_global_batch = false;
  /// Each rank updates 1 / ranks of the weights (ShardedOptimizer): `other_us` is divided. Reduce-scatter and
  /// all-gather move what all-reduce moves.
  bool sharded_update = false;
};

/// What a step on several ranks is made of, in microseconds.
struct StepPrediction {
  double us = 0;
  double communication_us = 0;  ///< Of all buckets together.
  double exposed_us = 0;        ///< The part that backward could not hide.
  double contention_us = 0;     ///< By which compute is longer because of what is hidden.
  double straggler_us = 0;      ///< Waiting for the slowest rank.
  std::string algorithm = {};   ///< Of the largest bucket.
};

/// Buckets are reduced one after the other, each as soon as it is ready and the one before is done:
/// start_k = max(ready_k, end_(k-1)), end_k = start_k + all_reduce(bytes_k); exposed is what lies behind backward's
/// end (Li et al. 2020, arXiv 2006.15704, section 3.2). A rank's step is drawn from `steps_us`: the median of the
/// largest of N independent draws is their 0.5^(1/N) quantile.
StepPrediction predict_step(const StepProfile& profile, const AllReduceModel& all_reduce, int ranks,
                            const StepOptions& options = {});

}  // namespace ddpkit::scaling
