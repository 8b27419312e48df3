#include <ddpkit/optim/fused_sgd.h>

#include <ATen/ops/_fused_sgd.h>
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

using Options = torch::optim::SGDOptions;
using State = torch::optim::SGDParamState;

const Options& checked(const torch::optim::OptimizerOptions& any) {
  const auto* options = dynamic_cast<const Options*>(&any);
  if (!options)
    throw InvalidArgument("a parameter group has the options of another optimizer: FusedSGD takes SGDOptions");
  if (!(options->lr() >= 0) || !(options->momentum() >= 0) || !(options->weight_decay() >= 0))
    throw InvalidArgument(
        fmt::format("lr, momentum and weight_decay must not be negative; they are lr {}, momentum {}, weight_decay {}",
                    options->lr(), options->momentum(), options->weight_decay()));
  if (options->nesterov() && (!(options->momentum() > 0) || options->dampening() != 0))
    throw InvalidArgument(
        fmt::format("Nesterov's momentum needs a momentum and no dampening; they are momentum {}, dampening {}",
                    options->momentum(), options->dampening()));
  return *options;
}

const Options& checked_groups(const std::vector<torch::optim::OptimizerParamGroup>& groups, const Options& defaults) {
  for (const auto& group : groups) {
    if (group.has_options()) checked(group.options());
  }
  return checked(defaults);
}

template <class Update>
void update_on_cpu(const Options& options, const std::vector<Update>& updates, double factor) {
  std::vector<kernels::SgdArguments> tasks;
  std::vector<std::size_t> numels;
  tasks.reserve(updates.size());
  numels.reserve(updates.size());
  for (const Update& update : updates) {
    numels.push_back(static_cast<std::size_t>(update.parameter.numel()));
    tasks.push_back({.dtype = *dtype_of(update.parameter.scalar_type()),
                     .parameter = update.parameter.data_ptr(),
                     .gradient = update.gradient.const_data_ptr(),
                     .momentum_buffer = options.momentum() != 0 ? update.tensors[0].data_ptr() : nullptr,
                     .master = update.master(),
                     .constants = {.lr = options.lr(),
                                   .momentum = options.momentum(),
                                   .dampening = options.dampening(),
                                   .weight_decay = options.weight_decay(),
                                   .nesterov = options.nesterov(),
                                   .first = update.fresh,
                                   .gradient_factor = factor}});
  }
  for_blocks(numels, [&](std::size_t task, std::size_t begin, std::size_t count) {
    kernels::SgdArguments part = tasks[task];
    const std::size_t bytes = size_of(part.dtype), state_bytes = part.master ? sizeof(float) : bytes;
    part.numel = count;
    part.parameter = advance(part.parameter, begin, bytes);
    part.gradient = advance(part.gradient, begin, bytes);
    part.momentum_buffer = advance(part.momentum_buffer, begin, state_bytes);
    if (part.master) part.master += begin;
    sgd(part);
  });
}

/// `rate`: a number, or a scalar of the device.
template <class Update, class Rate>
void update_on_device(const Options& options, const std::vector<Update>& updates, double factor, const Rate& rate) {
  // The kernels divide gradients by the scale.
  std::optional<at::Tensor> scale;
  const at::Device device = updates[0].parameter.device();
  if (std::abs(factor) != 1) scale = at::full({}, 1 / std::abs(factor), at::device(device).dtype(at::kFloat));
  for (const bool fresh : {true, false}) {
    std::vector<at::Tensor> parameters, gradients, buffers;
    for (const Update& update : updates) {
      if (update.fresh != fresh) continue;
      parameters.push_back(update.parameter);
      gradients.push_back(update.gradient);
      if (options.momentum() != 0) buffers.push_back(update.tensors[0]);
    }
    if (parameters.empty()) continue;
    at::_fused_sgd_(parameters, gradients, buffers, options.weight_decay(), options.momentum(), rate,
                    options.dampening(), options.nesterov(), factor < 0, fresh, scale, std::nullopt);
  }
}

}  // namespace

FusedSGD::FusedSGD(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, const Options& defaults,
                   const FusedOptions& options)
    : FusedOptimizer(param_groups, std::make_unique<Options>(checked_groups(param_groups, defaults)), options) {}

FusedSGD::FusedSGD(std::vector<at::Tensor> params, const Options& defaults, const FusedOptions& options)
    : FusedSGD({torch::optim::OptimizerParamGroup(std::move(params))}, defaults, options) {}

std::size_t FusedSGD::tensor_count(const torch::optim::OptimizerOptions& options) const {
  return checked(options).momentum() != 0 ? 1 : 0;
}

std::unique_ptr<torch::optim::OptimizerParamState> FusedSGD::make_state() const { return new_state<State>(); }

FusedOptimizer::StateTensors FusedSGD::tensors_of(const torch::optim::OptimizerParamState& state) const {
  return {static_cast<const State&>(state).momentum_buffer(), {}, {}, master_of(state)};
}

void FusedSGD::set_tensors(torch::optim::OptimizerParamState& state, const StateTensors& tensors) const {
  static_cast<State&>(state).momentum_buffer(tensors[0]);
  set_master(state, tensors[kMaster]);
}

void FusedSGD::update(const torch::optim::OptimizerOptions& any, std::vector<Update>& updates, double factor) {
  const Options& options = checked(any);
  const at::Device device = updates[0].parameter.device();
  if (device.is_cpu())
    update_on_cpu(options, updates, factor);
  else if (fused_options().capturable)
    update_on_device(options, updates, factor, device_learning_rate(any, device));
  else
    update_on_device(options, updates, factor, options.lr());
}

bool FusedSGD::same_options(const torch::optim::OptimizerOptions& a, const torch::optim::OptimizerOptions& b) const {
  return checked(a) == checked(b);
}

void FusedSGD::write(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<State, Options>(archive, *this);
}

void FusedSGD::read(torch::serialize::InputArchive& archive) {
  if (fused_options().master_weights)
    read_archive<WithMaster<State>, Options>(archive, *this);
  else
    read_archive<State, Options>(archive, *this);
}

}  // namespace ddpkit::optim
