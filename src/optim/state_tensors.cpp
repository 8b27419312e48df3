#include "optim/state_tensors.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <memory>
#include <sstream>
#include <typeinfo>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/optim/clip_grad_norm.h>
#include <ddpkit/optim/fused_optimizer.h>

#include "optim/algorithm.h"
#include "optim/fused_optimizer.h"

namespace ddpkit::optim {
namespace {

using torch::optim::Optimizer;

constexpr const char* kLayout = "state_layout";
constexpr std::int64_t kNone = -1;  ///< No state, or no tensor.

/// The numbers of one parameter's state in the archive.
struct StateLayout {
  std::int64_t steps = kNone;
  std::int64_t dtypes[Algorithm::kMaster + 1] = {kNone, kNone, kNone, kNone};
};
constexpr auto kNumbers = static_cast<std::int64_t>(sizeof(StateLayout) / sizeof(std::int64_t));

FusedOptimizer::Impl* fused_of(const Optimizer& optimizer) {
  const auto* fused = dynamic_cast<const FusedOptimizer*>(&optimizer);
  return fused ? &FusedOptimizer::Impl::of(*fused) : nullptr;
}

/// Returns null for an optimizer of another kind.
const Algorithm* known_algorithm(const Optimizer& optimizer) {
  if (const auto* fused = fused_of(optimizer)) return &fused->algorithm();
  if (typeid(optimizer) == typeid(torch::optim::AdamW)) return &algorithm_of<torch::optim::AdamWOptions>();
  if (typeid(optimizer) == typeid(torch::optim::Adam)) return &algorithm_of<torch::optim::AdamOptions>();
  if (typeid(optimizer) == typeid(torch::optim::SGD)) return &algorithm_of<torch::optim::SGDOptions>();
  return nullptr;
}

std::vector<at::Tensor> parameters_of(const Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& group : optimizer.param_groups()) {
    for (at::Tensor& parameter : distinct_parameters(group.params())) all.push_back(std::move(parameter));
  }
  return all;
}

Algorithm::AnyState* state_of(Optimizer& optimizer, const at::Tensor& parameter) {
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  return found == optimizer.state().end() ? nullptr : found->second.get();
}

}  // namespace

void write_without_tensors(Optimizer& optimizer, torch::serialize::OutputArchive& archive) {
  const Algorithm* const algorithm = known_algorithm(optimizer);
  if (!algorithm) return optimizer.save(archive);
  const auto parameters = parameters_of(optimizer);
  const at::Tensor all = at::full({std::ssize(parameters), kNumbers}, kNone, at::kLong);
  auto* layout = reinterpret_cast<StateLayout*>(all.data_ptr<std::int64_t>());
  for (const at::Tensor& parameter : parameters) {
    StateLayout& each = *layout++;
    Algorithm::AnyState* const state = state_of(optimizer, parameter);
    if (!state) continue;
    const std::int64_t* const steps = algorithm->steps_of(*state);
    each.steps = steps ? *steps : 0;
    const Algorithm::StateTensors tensors = algorithm->tensors_of(*state);
    for (std::size_t k = 0; k < tensors.size(); ++k) {
      if (tensors[k].defined()) each.dtypes[k] = static_cast<std::int64_t>(tensors[k].scalar_type());
    }
  }
  archive.write(kLayout, all, /*is_buffer=*/true);
  auto states = std::exchange(optimizer.state(), {});
  try {
    algorithm->write(archive, optimizer);
  } catch (...) {
    optimizer.state() = std::move(states);
    throw;
  }
  optimizer.state() = std::move(states);
}

void read_without_tensors(Optimizer& optimizer, torch::serialize::InputArchive& archive) {
  const Algorithm* const algorithm = known_algorithm(optimizer);
  if (!algorithm) return load_archive(optimizer, archive);
  const at::NoGradGuard no_grad;
  FusedOptimizer::Impl* const fused = fused_of(optimizer);
  const auto parameters = parameters_of(optimizer);
  at::Tensor all;
  archive.read(kLayout, all, /*is_buffer=*/true);
  if (all.dim() != 2 || all.size(0) != std::ssize(parameters) || all.size(1) != kNumbers)
    throw InvalidArgument(
        fmt::format("the optimizer has {} parameters, but its archive {}", parameters.size(), all.numel() / kNumbers));
  algorithm->read(archive, optimizer, fused && fused->options().master_weights);
  optimizer.state().clear();
  // A fused optimizer keeps its memory, which a CUDA graph may use.
  const auto memory = fused ? fused->state_memory() : std::vector<Algorithm::StateTensors>(parameters.size());
  const auto* layout = reinterpret_cast<const StateLayout*>(all.const_data_ptr<std::int64_t>());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (layout[i].steps == kNone) continue;
    auto& state = optimizer.state()[parameters[i].unsafeGetTensorImpl()];
    state = fused ? fused->make_state() : algorithm->make_state(/*master=*/false);
    if (std::int64_t* const steps = algorithm->steps_of(*state)) *steps = layout[i].steps;
    Algorithm::StateTensors tensors;
    for (std::size_t k = 0; k < tensors.size(); ++k) {
      if (layout[i].dtypes[k] == kNone) continue;
      const auto dtype = static_cast<at::ScalarType>(layout[i].dtypes[k]);
      tensors[k] = memory[i][k];
      if (!tensors[k].defined())
        tensors[k] = at::empty_like(parameters[i], parameters[i].options().dtype(dtype).requires_grad(false));
    }
    algorithm->set_tensors(*state, tensors);
  }
  if (fused) fused->set_device_steps();
}

std::string bytes_of(torch::serialize::OutputArchive& archive) {
  std::ostringstream stream;
  archive.save_to(stream);
  return std::move(stream).str();
}

void prepare_state(Optimizer& optimizer) {
  if (FusedOptimizer::Impl* const fused = fused_of(optimizer)) fused->state_memory();
}

std::vector<at::Tensor> state_tensors(Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  const Algorithm* const algorithm = known_algorithm(optimizer);
  if (!algorithm) return all;
  for (const at::Tensor& parameter : parameters_of(optimizer)) {
    const Algorithm::AnyState* const state = state_of(optimizer, parameter);
    if (!state) continue;
    for (const at::Tensor& tensor : algorithm->tensors_of(*state)) {
      if (tensor.defined()) all.push_back(tensor);
    }
  }
  return all;
}

}  // namespace ddpkit::optim
