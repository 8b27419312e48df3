#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>

#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "optim/fused_optimizer.h"

namespace ddpkit::optim {
namespace {

[[noreturn]] void throw_changed(const char* what) {
  throw InvalidArgument(
      fmt::format("GraphedStep: {} changed after the step was captured: make a new GraphedStep", what));
}

}  // namespace

at::Tensor FusedOptimizer::Impl::device_learning_rate(const AnyOptions& options, at::Device device) {
  if (!capture_) capture_ = std::make_unique<Capture>();
  std::size_t group = 0;
  while (&std::as_const(param_groups()).at(group).options() != &options) ++group;
  auto& [tensor, value] = capture_->learning_rates[{group, device.index()}];
  const double now = options.get_lr();
  if (capture_->capturing) {
    if (!tensor.defined())
      throw InvalidArgument(
          fmt::format("GraphedStep: parameter group {} has its first gradient in the captured step: "
                      "raise warmup_iterations until each parameter has had a gradient",
                      group));
    return tensor;
  }
  if (!tensor.defined())
    tensor = at::full({}, now, at::device(device).dtype(at::kFloat));
  else if (value != now)
    tensor.fill_(now);
  value = now;
  return tensor;
}

/// Returns the state's step count as a device scalar, which the graph increments. Undefined if the state has no step
/// count.
at::Tensor FusedOptimizer::Impl::device_steps(const at::Tensor& parameter, AnyState& state) {
  const std::int64_t* count = algorithm_.steps_of(state);
  if (!count) return {};
  at::Tensor& tensor = capture_->steps[parameter.unsafeGetTensorImpl()];
  if (!tensor.defined())
    tensor = at::full({}, static_cast<double>(*count), at::device(parameter.device()).dtype(at::kFloat));
  return tensor;
}

void FusedOptimizer::Impl::begin_capture() {
  if (!capture_) capture_ = std::make_unique<Capture>();
  capture_->capturing = true;
  capture_->parameters.clear();
}

void FusedOptimizer::Impl::end_capture() {
  capture_->capturing = false;
  capture_->layout = layout_.get();
  capture_->places.clear();
  capture_->options.clear();
  for (const at::Tensor& parameter : capture_->parameters) {
    capture_->places.push_back(parameter.const_data_ptr());
    const auto found = states().find(parameter.unsafeGetTensorImpl());
    if (found == states().end()) continue;
    if (auto* steps = algorithm_.steps_of(*found->second)) --*steps;  // Counted in the capture, not executed.
  }
  for (const auto& group : std::as_const(param_groups())) capture_->options.push_back(group.options().clone());
}

void FusedOptimizer::Impl::before_replay() {
  const at::NoGradGuard no_grad;
  if (capture_->layout != layout_.get() || (layout_ && !fits_layout()) ||
      capture_->options.size() != param_groups().size())
    throw_changed("the optimizer's parameters");
  for (std::size_t g = 0; g < param_groups().size(); ++g) {
    const auto& now = std::as_const(param_groups())[g].options();
    capture_->options[g]->set_lr(now.get_lr());
    if (!algorithm_.same_options(*capture_->options[g], now)) throw_changed("an option other than the learning rate");
  }
  for (std::size_t i = 0; i < capture_->parameters.size(); ++i) {
    if (capture_->parameters[i].const_data_ptr() != capture_->places[i]) throw_changed("the memory of a parameter");
  }
  for (auto& [key, rate] : capture_->learning_rates)
    device_learning_rate(std::as_const(param_groups())[key.first].options(), rate.tensor.device());
  // Increments the host counts, which archives contain. The graph increments the device counts.
  for (const at::Tensor& parameter : capture_->parameters) {
    parameter.unsafeGetTensorImpl()->bump_version();
    const auto found = states().find(parameter.unsafeGetTensorImpl());
    if (found == states().end()) continue;
    if (auto* steps = algorithm_.steps_of(*found->second)) ++*steps;
  }
}

void FusedOptimizer::Impl::set_device_steps() {
  if (!capture_) return;
  for (auto& [parameter, tensor] : capture_->steps) {
    const auto found = states().find(const_cast<void*>(parameter));
    tensor.fill_(found == states().end() ? 0.0 : static_cast<double>(*algorithm_.steps_of(*found->second)));
  }
}

}  // namespace ddpkit::optim
