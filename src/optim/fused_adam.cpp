#include <ddpkit/optim/fused_adam.h>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <cmath>
#include <optional>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "kernels/optimizer.h"
#include "optim/algorithm.h"
#include "tensor/parallel_for.h"
#include "tensor/tensor_memory.h"

namespace ddpkit::optim {
namespace {

/// Options of both, which LibTorch gives two types with the same members.
template <class Options>
const Options& checked(const torch::optim::OptimizerOptions& any) {
  const auto* options = dynamic_cast<const Options*>(&any);
  if (!options)
    throw InvalidArgument(
        "a parameter group has the options of another optimizer: FusedAdamW takes AdamWOptions, "
        "FusedAdam takes AdamOptions");
  const auto [beta1, beta2] = options->betas();
  const auto in_range = [](double beta) { return beta >= 0 && beta < 1; };
  if (!(options->lr() >= 0) || !(options->eps() >= 0) || !(options->weight_decay() >= 0) || !in_range(beta1) ||
      !in_range(beta2))
    throw InvalidArgument(
        fmt::format("lr, eps and weight_decay must not be negative, and betas be from 0 up to, but not, 1; they are "
                    "lr {}, eps {}, weight_decay {}, betas {} and {}",
                    options->lr(), options->eps(), options->weight_decay(), beta1, beta2));
  return *options;
}

template <class Options>
kernels::AdamConstants constants_of(const Options& options, bool decoupled, std::int64_t step, double gradient_factor) {
  const auto [beta1, beta2] = options.betas();
  const auto count = static_cast<double>(step);
  return {.beta1 = beta1,
          .beta2 = beta2,
          .eps = options.eps(),
          .decay = decoupled ? 1 - options.lr() * options.weight_decay() : 1,
          .weight_decay = decoupled ? 0 : options.weight_decay(),
          .step_size = options.lr() / (1 - std::pow(beta1, count)),
          .inverse_root = 1 / std::sqrt(1 - std::pow(beta2, count)),
          .gradient_factor = gradient_factor};
}

using Update = Algorithm::Update;

template <class Options, class State>
void update_on_cpu(const Options& options, bool decoupled, const std::vector<Update>& updates, double factor) {
  std::vector<kernels::AdamArguments> tasks;
  std::vector<std::size_t> numels;
  tasks.reserve(updates.size());
  numels.reserve(updates.size());
  std::int64_t last_step = 0;
  kernels::AdamConstants constants;
  for (const Update& update : updates) {
    const std::int64_t step = static_cast<const State&>(*update.state).step();
    if (step != last_step) constants = constants_of(options, decoupled, last_step = step, factor);
    numels.push_back(static_cast<std::size_t>(update.parameter.numel()));
    tasks.push_back({.dtype = *dtype_of(update.parameter.scalar_type()),
                     .parameter = update.parameter.data_ptr(),
                     .gradient = update.gradient.const_data_ptr(),
                     .exp_avg = update.tensors[0].data_ptr(),
                     .exp_avg_sq = update.tensors[1].data_ptr(),
                     .max_exp_avg_sq = options.amsgrad() ? update.tensors[2].data_ptr() : nullptr,
                     .master = update.master(),
                     .constants = constants});
  }
  for_blocks(numels, [&](std::size_t task, std::size_t begin, std::size_t count) {
    kernels::AdamArguments part = tasks[task];
    const std::size_t bytes = size_of(part.dtype), state_bytes = part.master ? sizeof(float) : bytes;
    part.numel = count;
    part.parameter = advance(part.parameter, begin, bytes);
    part.gradient = advance(part.gradient, begin, bytes);
    part.exp_avg = advance(part.exp_avg, begin, state_bytes);
    part.exp_avg_sq = advance(part.exp_avg_sq, begin, state_bytes);
    part.max_exp_avg_sq = advance(part.max_exp_avg_sq, begin, state_bytes);
    if (part.master) part.master += begin;
    adam(part);
  });
}

/// `rate`: a number, or a scalar of the device. `state_steps` counts this step already.
template <class Options, class Rate>
void update_on_device(const Options& options, bool decoupled, const std::vector<Update>& updates, double factor,
                      const std::vector<at::Tensor>& state_steps, const Rate& rate) {
  std::vector<at::Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs;
  for (const Update& update : updates) {
    parameters.push_back(update.parameter);
    gradients.push_back(update.gradient);
    exp_avgs.push_back(update.tensors[0]);
    exp_avg_sqs.push_back(update.tensors[1]);
    if (options.amsgrad()) max_exp_avg_sqs.push_back(update.tensors[2]);
  }
  // The kernels divide gradients by the scale.
  std::optional<at::Tensor> scale;
  if (std::abs(factor) != 1)
    scale = at::full({}, 1 / std::abs(factor), at::device(parameters[0].device()).dtype(at::kFloat));
  const double beta1 = std::get<0>(options.betas()), beta2 = std::get<1>(options.betas());
  const auto fused = [&](const auto& function) {
    function(parameters, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, rate, beta1, beta2,
             options.weight_decay(), options.eps(), options.amsgrad(), factor < 0, scale, std::nullopt);
  };
  if (decoupled)
    fused([](const auto&... arguments) { at::_fused_adamw_(arguments...); });
  else
    fused([](const auto&... arguments) { at::_fused_adam_(arguments...); });
}

/// The step counts, brought to the device. [update]
template <class State>
std::vector<at::Tensor> steps_on_device(const std::vector<Update>& updates) {
  // Pinned: from pageable memory the copy would make the host wait.
  const auto count = static_cast<std::int64_t>(updates.size());
  const at::Tensor steps = at::empty({count}, at::dtype(at::kFloat).pinned_memory(true));
  auto* next = steps.data_ptr<float>();
  for (const Update& update : updates) *next++ = static_cast<float>(static_cast<const State&>(*update.state).step());
  return steps.to(updates[0].parameter.device(), /*non_blocking=*/true).unbind();
}

/// LibTorch gives the options and states of both optimizers two types with the same members.
template <class Options, class State, bool kDecoupled>
class Adam final : public AlgorithmOf<Options, State> {
 public:
  using AnyOptions = Algorithm::AnyOptions;
  using AnyState = Algorithm::AnyState;
  using StateTensors = Algorithm::StateTensors;

  void check(const AnyOptions& any) const override { checked<Options>(any); }
  std::size_t tensor_count(const AnyOptions& any) const override { return checked<Options>(any).amsgrad() ? 3 : 2; }
  StateTensors tensors_of(const AnyState& any) const override {
    const auto& state = static_cast<const State&>(any);
    return {state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq()};
  }
  void set_tensors(AnyState& any, const StateTensors& tensors) const override {
    auto& state = static_cast<State&>(any);
    state.exp_avg(tensors[0]);
    state.exp_avg_sq(tensors[1]);
    state.max_exp_avg_sq(tensors[2]);
  }
  std::int64_t* steps_of(AnyState& any) const override { return &static_cast<State&>(any).step(); }

  void update(const AnyOptions& any, std::vector<Update>& updates, double gradient_factor,
              const at::Tensor& rate) const override {
    const auto& options = checked<Options>(any);
    for (const Update& update : updates) ++*steps_of(*update.state);
    if (updates[0].parameter.is_cpu())
      return update_on_cpu<Options, State>(options, kDecoupled, updates, gradient_factor);
    if (!rate.defined())
      return update_on_device(options, kDecoupled, updates, gradient_factor, steps_on_device<State>(updates),
                              options.lr());
    std::vector<at::Tensor> steps;
    for (const Update& update : updates) steps.push_back(update.steps);
    at::_foreach_add_(steps, 1);
    update_on_device(options, kDecoupled, updates, gradient_factor, steps, rate);
  }
};

}  // namespace

template <>
const Algorithm& algorithm_of<torch::optim::AdamWOptions>() {
  static const Adam<torch::optim::AdamWOptions, torch::optim::AdamWParamState, /*kDecoupled=*/true> algorithm;
  return algorithm;
}

template <>
const Algorithm& algorithm_of<torch::optim::AdamOptions>() {
  static const Adam<torch::optim::AdamOptions, torch::optim::AdamParamState, /*kDecoupled=*/false> algorithm;
  return algorithm;
}

}  // namespace ddpkit::optim
