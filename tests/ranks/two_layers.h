// A small model with inputs and a loss, for tests of sharded optimizers.
#pragma once

#include <torch/torch.h>

#include <cstdint>

namespace ddpkit::testing::two_layers {

constexpr std::int64_t kWidth = 40;

inline torch::nn::Sequential make_model() {
  torch::manual_seed(3);
  torch::nn::Sequential model(torch::nn::Linear(kWidth, kWidth), torch::nn::Tanh(), torch::nn::Linear(kWidth, 3));
  model->to(torch::kDouble);
  return model;
}

inline torch::Tensor input(int step, int rank) {
  torch::manual_seed(static_cast<std::uint64_t>(1000 * step + rank));
  return torch::randn({4, kWidth}, torch::kDouble);
}

inline torch::Tensor loss_of(const torch::Tensor& output) { return (output - 1).pow(2).mean(); }

}  // namespace ddpkit::testing::two_layers
