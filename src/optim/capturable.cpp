// Learning rates and step counts where kernels of a captured step() read them.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>

#include <utility>

#include <ddpkit/optim/fused_optimizer.h>

namespace ddpkit::optim {

at::Tensor FusedOptimizer::device_learning_rate(const torch::optim::OptimizerOptions& options, at::Device device) {
  DeviceNumber& number = learning_rates_[&options];
  const double now = options.get_lr();
  if (!number.tensor.defined())
    number.tensor = at::full({}, now, at::device(device).dtype(at::kFloat));
  else if (number.value != now)
    number.tensor.fill_(now);
  number.value = now;
  return number.tensor;
}

at::Tensor FusedOptimizer::device_step(const torch::optim::OptimizerParamState& state, std::int64_t steps,
                                       at::Device device) {
  DeviceNumber& number = steps_[&state];
  if (!number.tensor.defined())
    number.tensor = at::full({}, static_cast<double>(steps), at::device(device).dtype(at::kFloat));
  return number.tensor;
}

void FusedOptimizer::before_replay() {
  const at::NoGradGuard no_grad;
  for (const auto& group : std::as_const(param_groups_)) {
    const auto found = learning_rates_.find(&group.options());
    if (found != learning_rates_.end()) device_learning_rate(group.options(), found->second.tensor.device());
  }
  count_steps(1);
}

void FusedOptimizer::after_capture() { count_steps(-1); }

/// On the host, where archives are written from. The device counts by itself.
void FusedOptimizer::count_steps(std::int64_t count) {
  for (const auto& group : std::as_const(param_groups_)) {
    for (const at::Tensor& parameter : group.params()) {
      const auto found = state_.find(parameter.unsafeGetTensorImpl());
      if (found != state_.end() && parameter.grad().defined()) add_steps(*found->second, count);
    }
  }
}

void FusedOptimizer::forget_device_numbers() noexcept {
  learning_rates_.clear();
  steps_.clear();
}

}  // namespace ddpkit::optim
