// Comparisons of tensors, of a model's parameters or gradients, and between ranks.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <vector>

#include <ddpkit/comm/process_group.h>

#include "support/catch.h"

namespace ddpkit::testing {

/// Returns each parameter once, also if it is tied.
inline std::vector<torch::Tensor> unique_parameters(const torch::nn::Module& module) {
  std::vector<torch::Tensor> parameters;
  for (const auto& parameter : module.parameters()) {
    const bool seen =
        std::any_of(parameters.begin(), parameters.end(), [&](const auto& p) { return p.is_same(parameter); });
    if (!seen) parameters.push_back(parameter);
  }
  return parameters;
}

inline torch::Tensor flat(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> parts;
  for (const auto& tensor : tensors) parts.push_back(tensor.detach().reshape({-1}));
  return torch::cat(parts);
}

inline torch::Tensor flat_parameters(const torch::nn::Module& module) { return flat(unique_parameters(module)); }

inline torch::Tensor flat_gradients(const torch::nn::Module& module) {
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : unique_parameters(module)) gradients.push_back(parameter.grad());
  return flat(gradients);
}

/// Returns the largest difference of two elements; 0 for empty tensors.
inline double largest_difference(const torch::Tensor& a, const torch::Tensor& b) {
  REQUIRE(a.sizes() == b.sizes());
  return a.numel() == 0 ? 0 : (a - b).abs().max().item<double>();
}

inline void check_same_bits_on_all_ranks(const ProcessGroup& group, const torch::Tensor& tensor) {
  const auto all = group.all_gather(tensor);
  for (int r = 1; r < group.world_size(); ++r) CHECK(torch::equal(all[r], all[0]));
}

/// Checks that parameters and buffers are equal bit for bit on all ranks.
inline void check_same_bits_on_all_ranks(const ProcessGroup& group, const torch::nn::Module& module) {
  for (const auto& parameter : module.parameters()) check_same_bits_on_all_ranks(group, parameter.detach());
  for (const auto& buffer : module.buffers()) check_same_bits_on_all_ranks(group, buffer);
}

}  // namespace ddpkit::testing
