// Tier 0: the standard library only.
#pragma once

#include <vector>

#include <ddpkit/scaling/step.h>

namespace ddpkit::scaling {

/// Options of estimate_training_speedup().
struct TrainingEstimateOptions {
  std::vector<int> devices = {1, 2, 4, 8};  ///< Numbers of devices to predict.
  StepOptions step = {};                    ///< How the devices execute a step.
  double steps = 0;           ///< Steps of the whole training on one device, for duration and cost; 0: unknown.
  double price_per_hour = 0;  ///< Price of one device; 0: unknown.
};

/// Prediction for training on `devices` devices. Each device has the batch of one device, so the global batch grows and
/// an epoch has fewer steps. With `fixed_global_batch` the devices share that batch, and each step is shorter.
struct TrainingEstimate {
  int devices = 1;           ///< Number of devices.
  StepPrediction step = {};  ///< One step on these devices.
  double speedup = 1;        ///< Samples per second relative to one device without a wrapper.
  double efficiency = 1;     ///< speedup / devices.
  double hours = 0;          ///< Duration of the whole training; 0: unknown.
  double cost = 0;           ///< Cost of all devices for that duration, in the currency of the price; 0: unknown.
};

/// Predicts the speedup of training on several devices, with predict_step(). In the order of `devices`.
std::vector<TrainingEstimate> estimate_training_speedup(const StepProfile& profile, const AllReduceModel& all_reduce,
                                                        const TrainingEstimateOptions& options = {});

/// Returns the smallest power of two of devices, up to `most`, at which the efficiency is below `efficiency`; 0 if
/// there is none.
int devices_at_efficiency(const StepProfile& profile, const AllReduceModel& all_reduce, double efficiency, int most,
                          const StepOptions& options = {});

}  // namespace ddpkit::scaling
