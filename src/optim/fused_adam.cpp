#include <ddpkit/optim/fused_adam.h>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <optional>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "kernels/optimizer.h"
#include "optim/algorithm.h"
#include "optim/fused_optimizer.h"

namespace ddpkit::optim {
namespace {

/// Options of Adam and AdamW: LibTorch has two types with the same members.
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
  std::vector<kernels::AdamConstants> constants;  // [update]
  std::int64_t last_step = 0;
  for (const Update& update : updates) {
    const std::int64_t step = static_cast<const State&>(*update.state).step();
    constants.push_back(step == last_step ? constants.back() : constants_of(options, decoupled, step, factor));
    last_step = step;
  }
  for_update_blocks(updates, [&](std::size_t task, const Update& update, const UpdateBlock& block) {
    kernels::adam({.dtype = block.dtype,
                   .numel = block.count,
                   .parameter = block.of(update.parameter),
                   .gradient = block.of(update.gradient),
                   .exp_avg = block.of(update.tensors[0]),
                   .exp_avg_sq = block.of(update.tensors[1]),
                   .max_exp_avg_sq = options.amsgrad() ? block.of(update.tensors[2]) : nullptr,
                   .master = static_cast<float*>(block.of(update.tensors[Algorithm::kMaster])),
                   .constants = constants[task]});
  });
}

/// `rate`: a number or a device scalar. `state_steps`: step counts that include this step.
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
  const std::optional<at::Tensor> scale = scale_of(factor, parameters[0].device());
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

/// Returns the step counts on the device. [update]
template <class State>
std::vector<at::Tensor> steps_on_device(const std::vector<Update>& updates) {
  // Pinned memory: the host would wait for a copy from pageable memory.
  const auto count = static_cast<std::int64_t>(updates.size());
  const at::Tensor steps = at::empty({count}, at::dtype(at::kFloat).pinned_memory(true));
  auto* next = steps.data_ptr<float>();
  for (const Update& update : updates) *next++ = static_cast<float>(static_cast<const State&>(*update.state).step());
  return steps.to(updates[0].parameter.device(), /*non_blocking=*/true).unbind();
}

/// LibTorch has two types of options and two of states with the same members.
template <class Options, class State, bool kDecoupled>
class Adam final : public AlgorithmOf<Options, State> {
 public:
  using AnyOptions = Algorithm::AnyOptions;
  using StateTensors = Algorithm::StateTensors;

  void check(const AnyOptions& any) const override { checked<Options>(any); }
  std::size_t tensor_count(const AnyOptions& any) const override { return checked<Options>(any).amsgrad() ? 3 : 2; }
  std::int64_t* steps_of(Algorithm::AnyState& any) const override { return &static_cast<State&>(any).step(); }

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

 private:
  StateTensors own_tensors_of(const State& state) const override {
    return {state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq()};
  }
  void set_own_tensors(State& state, const StateTensors& tensors) const override {
    state.exp_avg(tensors[0]);
    state.exp_avg_sq(tensors[1]);
    state.max_exp_avg_sq(tensors[2]);
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

template class FusedOptimizerWith<torch::optim::AdamWOptions>;
template class FusedOptimizerWith<torch::optim::AdamOptions>;

}  // namespace ddpkit::optim
