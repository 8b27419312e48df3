#include <ddpkit/scaling/estimate.h>

#include <stdexcept>

namespace ddpkit::scaling {
namespace {

// Throughput of all devices with steps of `step_us`, relative to one device.
double speedup_of(const StepProfile& profile, double step_us, int devices, const StepOptions& options) {
  return (options.fixed_global_batch ? 1 : devices) * profile.step_us() / step_us;
}

}  // namespace

std::vector<TrainingEstimate> estimate_training_speedup(const StepProfile& profile, const AllReduceModel& all_reduce,
                                                        const TrainingEstimateOptions& options) {
  if (!(profile.step_us() > 0)) throw std::invalid_argument("the step time of one device must be above 0");
  std::vector<TrainingEstimate> estimates;
  for (const int devices : options.devices) {
    TrainingEstimate estimate{.devices = devices, .step = predict_step(profile, all_reduce, devices, options.step)};
    estimate.speedup = speedup_of(profile, estimate.step.us, devices, options.step);
    estimate.efficiency = estimate.speedup / devices;
    estimate.hours = options.steps * profile.step_us() / estimate.speedup / 3.6e9;
    estimate.cost = estimate.hours * devices * options.price_per_hour;
    estimates.push_back(estimate);
  }
  return estimates;
}

int devices_at_efficiency(const StepProfile& profile, const AllReduceModel& all_reduce, double efficiency, int most,
                          const StepOptions& options) {
  for (int devices = 2; devices <= most; devices *= 2) {
    const double step_us = predict_step(profile, all_reduce, devices, options).us;
    if (speedup_of(profile, step_us, devices, options) < efficiency * devices) return devices;
  }
  return 0;
}

}  // namespace ddpkit::scaling
