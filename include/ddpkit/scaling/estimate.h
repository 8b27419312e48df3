// Tier 0: the standard library only.
#pragma once

#include <vector>

#include <ddpkit/scaling/step.h>

namespace ddpkit::scaling {

/// Options of estimate_training_speedup().
struct TrainingEstimateOptions {
  std::vector<int> devices = {1, 2, 4, 8};  ///< Numbers of devices to predict for.
  StepOptions step = {};
  double steps = 0;           ///< Of the whole training on one device, for its duration and cost; 0: unknown.
  double price_per_hour = 0;  ///< Of one device; 0: unknown.
};

/// Training on so many devices. Each has the batch that one has: the global batch grows with them, and an epoch takes
/// fewer steps; with `fixed_global_batch` they share that batch, and each step takes less.
struct TrainingEstimate {
  int devices = 1;
  StepPrediction step = {};
  double speedup = 1;     ///< Samples a second over those of one device without any wrapper.
  double efficiency = 1;  ///< speedup / devices.
  double hours = 0;       ///< Of the whole training; 0: unknown.
  double cost = 0;        ///< Of all devices over that time, in the price's currency; 0: unknown.
};

/// What training on several devices gains, by predict_step(). In the order of `devices`.
std::vector<TrainingEstimate> estimate_training_speedup(const StepProfile& profile, const AllReduceModel& all_reduce,
                                                        const TrainingEstimateOptions& options = {});

/// The smallest number of devices among powers of two up to `most` at which efficiency has fallen below
/// `efficiency`; 0 when it has not. Where a model stops scaling.
int devices_at_efficiency(const StepProfile& profile, const AllReduceModel& all_reduce, double efficiency, int most,
                          const StepOptions& options = {});

}  // namespace ddpkit::scaling
