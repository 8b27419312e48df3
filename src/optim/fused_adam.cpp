#include <ddpkit/optim/fused_adam.h>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <cmath>
#include <optional>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "kernels/optimizer.h"
#include "optim/optimizer_archive.h"
#include "tensor/blocks.h"
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
const Options& checked_groups(const std::vector<torch::optim::OptimizerParamGroup>& groups, const Options& defaults) {
  for (const auto& group : groups) {
    if (group.has_options()) checked<Options>(group.options());
  }
  return checked<Options>(defaults);
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

template <class Options, class State, class Update>
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
template <class Options, class Update, class Rate>
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
template <class State, class Update>
std::vector<at::Tensor> steps_on_device(const std::vector<Update>& updates) {
  // Pinned: from pageable memory the copy would make the host wait.
  const auto count = static_cast<std::int64_t>(updates.size());
  const at::Tensor steps = at::empty({count}, at::dtype(at::kFloat).pinned_memory(true));
  auto* next = steps.data_ptr<float>();
  for (const Update& update : updates) *next++ = static_cast<float>(static_cast<const State&>(*update.state).step());
  return steps.to(updates[0].parameter.device(), /*non_blocking=*/true).unbind();
}

}  // namespace

template <class Options, class State, bool kDecoupled>
FusedAdamFamily<Options, State, kDecoupled>::FusedAdamFamily(
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups, const Options& defaults,
    const FusedOptions& options)
    : FusedOptimizer(param_groups, std::make_unique<Options>(checked_groups(param_groups, defaults)), options) {}

template <class Options, class State, bool kDecoupled>
FusedAdamFamily<Options, State, kDecoupled>::FusedAdamFamily(std::vector<at::Tensor> params, const Options& defaults,
                                                             const FusedOptions& options)
    : FusedAdamFamily({torch::optim::OptimizerParamGroup(std::move(params))}, defaults, options) {}

template <class Options, class State, bool kDecoupled>
std::size_t FusedAdamFamily<Options, State, kDecoupled>::tensor_count(
    const torch::optim::OptimizerOptions& options) const {
  return checked<Options>(options).amsgrad() ? 3 : 2;
}

template <class Options, class State, bool kDecoupled>
std::unique_ptr<torch::optim::OptimizerParamState> FusedAdamFamily<Options, State, kDecoupled>::make_state() const {
  return new_state<State>();
}

template <class Options, class State, bool kDecoupled>
FusedOptimizer::StateTensors FusedAdamFamily<Options, State, kDecoupled>::tensors_of(
    const torch::optim::OptimizerParamState& any) const {
  const auto& state = static_cast<const State&>(any);
  return {state.exp_avg(), state.exp_avg_sq(), state.max_exp_avg_sq(), master_of(any)};
}

template <class Options, class State, bool kDecoupled>
void FusedAdamFamily<Options, State, kDecoupled>::set_tensors(torch::optim::OptimizerParamState& any,
                                                              const StateTensors& tensors) const {
  auto& state = static_cast<State&>(any);
  state.exp_avg(tensors[0]);
  state.exp_avg_sq(tensors[1]);
  state.max_exp_avg_sq(tensors[2]);
  set_master(any, tensors[kMaster]);
}

template <class Options, class State, bool kDecoupled>
void FusedAdamFamily<Options, State, kDecoupled>::update(const torch::optim::OptimizerOptions& any,
                                                         std::vector<Update>& updates, double gradient_factor) {
  const auto& options = checked<Options>(any);
  for (const Update& update : updates) {
    auto& state = static_cast<State&>(*update.state);
    state.step(state.step() + 1);
  }
  const at::Device device = updates[0].parameter.device();
  if (device.is_cpu()) return update_on_cpu<Options, State>(options, kDecoupled, updates, gradient_factor);
  if (!fused_options().capturable)
    return update_on_device(options, kDecoupled, updates, gradient_factor, steps_on_device<State>(updates),
                            options.lr());
  std::vector<at::Tensor> steps;
  for (const Update& update : updates) steps.push_back(device_step(update, device));
  at::_foreach_add_(steps, 1);
  update_on_device(options, kDecoupled, updates, gradient_factor, steps, device_learning_rate(any, device));
}

template <class Options, class State, bool kDecoupled>
bool FusedAdamFamily<Options, State, kDecoupled>::same_options(const torch::optim::OptimizerOptions& a,
                                                               const torch::optim::OptimizerOptions& b) const {
  return checked<Options>(a) == checked<Options>(b);
}

template <class Options, class State, bool kDecoupled>
std::int64_t* FusedAdamFamily<Options, State, kDecoupled>::steps_of(torch::optim::OptimizerParamState& any) const {
  return &static_cast<State&>(any).step();
}

template <class Options, class State, bool kDecoupled>
void FusedAdamFamily<Options, State, kDecoupled>::write(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<State, Options>(archive, *this);
}

template <class Options, class State, bool kDecoupled>
void FusedAdamFamily<Options, State, kDecoupled>::read(torch::serialize::InputArchive& archive) {
  if (fused_options().master_weights)
    read_archive<WithMaster<State>, Options>(archive, *this);
  else
    read_archive<State, Options>(archive, *this);
}

template class FusedAdamFamily<torch::optim::AdamWOptions, torch::optim::AdamWParamState, true>;
template class FusedAdamFamily<torch::optim::AdamOptions, torch::optim::AdamParamState, false>;

}  // namespace ddpkit::optim
