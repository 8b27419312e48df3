#include <ddpkit/optim/grad_scaler.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/optim/clip_grad_norm.h>
#include <ddpkit/optim/fused_optimizer.h>

#include "optim/optimizer_archive.h"
#include "parallel/join.h"

namespace ddpkit::optim {
namespace {

/// Returns the parameters that have a gradient.
std::vector<at::Tensor> parameters_of(torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : std::as_const(optimizer).param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.grad().defined()) parameters.push_back(parameter);
    }
  }
  return distinct_parameters(parameters);
}

/// Multiplies all gradients by `factor` in place. Returns whether a gradient was not finite.
bool unscale(const std::vector<at::Tensor>& parameters, double factor) {
  const at::NoGradGuard no_grad;
  std::map<std::string, std::vector<at::Tensor>> gradients;  // Key: device and type.
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().scalar_type() == at::kHalf)
      throw InvalidArgument(
          "GradScaler can't unscale float16 gradients in place, where they would be rounded to zero: call step() of a "
          "fused optimizer of ddpkit without unscale_(), clip by max_norm * get_scale(), or keep the parameters in "
          "float32 and use autocast");
    at::Tensor values = parameter.grad().detach();
    if (values.layout() == at::kSparse) values = values._values();
    gradients[values.device().str() + c10::toString(values.scalar_type())].push_back(values);
  }
  bool found = false;
  for (auto& [key, values] : gradients) {
    const auto options = values[0].options().dtype(at::kFloat).requires_grad(false);
    at::Tensor found_inf = at::zeros({1}, options);
    at::_amp_foreach_non_finite_check_and_unscale_(values, found_inf, at::full({1}, factor, options));
    found = found_inf.item<float>() != 0 || found;
  }
  return found;
}

}  // namespace

GradScaler::GradScaler(std::optional<ProcessGroup> group, const GradScalerOptions& options)
    : group_(std::move(group)), options_(options), scale_(options.init_scale) {
  if (!(options.init_scale > 0) || !(options.growth_factor > 1) || !(options.backoff_factor > 0) ||
      !(options.backoff_factor < 1) || options.growth_interval < 1)
    throw InvalidArgument(fmt::format(
        "GradScaler needs init_scale > 0, growth_factor > 1, 0 < backoff_factor < 1 and growth_interval >= 1; they are "
        "{}, {}, {} and {}",
        options.init_scale, options.growth_factor, options.backoff_factor, options.growth_interval));
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const { return options_.enabled ? loss.mul(scale_) : loss; }

bool GradScaler::on_any_rank(bool found_inf, const at::Device& device) const {
  if (!group_ || group_->world_size() == 1) return found_inf;
  const at::Tensor flag = at::full({1}, found_inf ? 1.0 : 0.0, at::device(device).dtype(at::kFloat));
  group_->all_reduce(flag, ReduceOp::kMax);
  const bool found = flag.item<float>() != 0;
  group_->check();
  return found;
}

void GradScaler::check_group(const torch::optim::Optimizer& optimizer) const {
  const auto* scaling = dynamic_cast<const GradientScaling*>(&optimizer);
  if (!group_ && scaling && scaling->has_sharded_gradients())
    throw InvalidArgument(
        "each rank of a ShardedOptimizer sees only its part of the gradients: give GradScaler the process group, so "
        "that all skip the same steps");
  if (scaling && scaling->has_sharded_gradients() && JoinContext::running(*group_))
    throw InvalidArgument(
        "within join(), GradScaler cannot see the gradients that a ShardedOptimizer has on ranks without inputs: use "
        "bfloat16 or float32, which need no GradScaler, or an optimizer that is not sharded");
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) return;
  check_group(optimizer);
  PerOptimizer& state = optimizers_[&optimizer];
  if (state.stage != Stage::kReady)
    throw InvalidArgument(
        state.stage == Stage::kUnscaled
            ? "unscale_() has already been called for this optimizer since the last update()"
            : "unscale_() is called after step(): it must come before, with update() at the iteration's end");
  state.found_inf = on_any_rank(unscale(parameters_of(optimizer), 1 / scale_), group_ ? group_->device() : at::kCPU);
  state.stage = Stage::kUnscaled;
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) return optimizer.step(), true;
  PerOptimizer& state = optimizers_[&optimizer];
  if (state.stage == Stage::kStepped)
    throw InvalidArgument("step() has already been called for this optimizer since the last update()");
  auto* scaling = dynamic_cast<GradientScaling*>(&optimizer);
  if (scaling && state.stage == Stage::kReady) {
    check_group(optimizer);
    const double largest = grad_norm(parameters_of(optimizer), std::numeric_limits<double>::infinity());
    state.found_inf = on_any_rank(!std::isfinite(largest), group_ ? group_->device() : at::kCPU);
    state.stage = Stage::kStepped;
    if (!state.found_inf) scaling->step_scaled(1 / scale_);
    return !state.found_inf;
  }
  if (state.stage == Stage::kReady) {
    unscale_(optimizer);
  }
  state.stage = Stage::kStepped;
  if (state.found_inf) return false;
  optimizer.step();
  return true;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!options_.enabled) return;
  if (new_scale) {
    if (!(*new_scale > 0) || !std::isfinite(*new_scale))
      throw InvalidArgument(fmt::format("the new scale is {}, but must be positive", *new_scale));
    scale_ = *new_scale;
  } else if (optimizers_.empty()) {
    throw InvalidArgument("update() is called before any step() or unscale_() of this iteration");
  } else {
    bool found_inf = false;
    for (const auto& [optimizer, state] : optimizers_) found_inf = found_inf || state.found_inf;
    if (found_inf) {
      scale_ *= options_.backoff_factor;
      growth_tracker_ = 0;
    } else if (++growth_tracker_ == options_.growth_interval) {
      // As in Python, the scale stays finite in float32.
      const double grown = scale_ * options_.growth_factor;
      if (std::isfinite(static_cast<float>(grown))) scale_ = grown;
      growth_tracker_ = 0;
    }
  }
  optimizers_.clear();
}

void GradScaler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("scale", c10::IValue(scale_));
  archive.write("growth_factor", c10::IValue(options_.growth_factor));
  archive.write("backoff_factor", c10::IValue(options_.backoff_factor));
  archive.write("growth_interval", c10::IValue(options_.growth_interval));
  archive.write("_growth_tracker", c10::IValue(growth_tracker_));
}

void GradScaler::load(torch::serialize::InputArchive& archive) {
  GradScalerOptions options = options_;
  options.growth_factor = read_value(archive, "growth_factor").toDouble();
  options.backoff_factor = read_value(archive, "backoff_factor").toDouble();
  options.growth_interval = read_value(archive, "growth_interval").toInt();
  const double scale = read_value(archive, "scale").toDouble();
  growth_tracker_ = read_value(archive, "_growth_tracker").toInt();
  scale_ = scale;
  options_ = options;
}

}  // namespace ddpkit::optim
