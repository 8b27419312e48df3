#include <ddpkit/scaling/estimate.h>

#include <stdexcept>

namespace ddpkit::scaling {

std::vector<TrainingEstimate> estimate_training_speedup(const StepProfile& profile, const AllReduceModel& all_reduce,
                                                        const TrainingEstimateOptions& options) {
  if (!(profile.step_us() > 0)) throw std::invalid_argument("a step of one device that takes no time");
  std::vector<TrainingEstimate> estimates;
  for (const int devices : options.devices) {
    TrainingEstimate estimate{.devices = devices, .step = predict_step(profile, all_reduce, devices, options.step)};
    estimate.efficiency = profile.step_us() / estimate.step.us;
    estimate.speedup = devices * estimate.efficiency;
    estimate.hours = options.steps / devices * estimate.step.us / 3.6e9;
    estimate.cost = estimate.hours * devices * options.price_per_hour;
    estimates.push_back(estimate);
  }
  return estimates;
}

int devices_at_efficiency(const StepProfile& profile, const AllReduceModel& all_reduce, double efficiency, int most,
                          const StepOptions& options) {
  for (int devices = 2; devices <= most; devices *= 2) {
    if (profile.step_us() / predict_step(profile, all_reduce, devices, options).us < efficiency) return devices;
  }
  return 0;
}

}  // namespace ddpkit::scaling
