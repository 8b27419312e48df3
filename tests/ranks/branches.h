// A model whose ranks may use different parameters, and the gradients that one process computes for all ranks.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/parallel/distributed_data_parallel.h>

#include "ranks/comparisons.h"
#include "support/catch.h"

namespace ddpkit::testing {

constexpr std::int64_t kRows = 6;    // Per rank.
constexpr std::int64_t kWidth = 40;  // A weight has 12.8 KB: large enough for the arena.

inline torch::Tensor input(std::int64_t step, int rank) {
  torch::manual_seed(static_cast<std::uint64_t>(1000 * step + rank));
  return torch::randn({kRows, kWidth}, torch::kDouble);
}

/// A trunk and two branches. The caller of forward selects the branches.
struct BranchesImpl : torch::nn::Module {
  explicit BranchesImpl(std::uint64_t seed = 0) {
    torch::manual_seed(seed);
    trunk = register_module("trunk", torch::nn::Linear(kWidth, kWidth));
    left = register_module("left", torch::nn::Linear(kWidth, kWidth));
    right = register_module("right", torch::nn::Linear(kWidth, kWidth));
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x, const std::string& branches) {
    torch::Tensor sum = torch::tanh(trunk(x));
    if (branches.find('l') != std::string::npos) sum = sum + torch::tanh(left(sum));
    if (branches.find('r') != std::string::npos) sum = sum + torch::tanh(right(sum));
    return sum;
  }
  torch::nn::Linear trunk{nullptr}, left{nullptr}, right{nullptr};
};
TORCH_MODULE(Branches);

/// Returns the mean over ranks of each rank's gradients, computed by one process. The gradient is undefined if no rank
/// has one. [param]
template <class LossOfRank>
std::vector<torch::Tensor> expected_gradients(torch::nn::Module& model, int ranks, const LossOfRank& loss_of_rank) {
  torch::Tensor loss = torch::zeros({}, torch::kDouble);
  for (int r = 0; r < ranks; ++r) loss = loss + loss_of_rank(r) / ranks;
  loss.backward();
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : model.parameters())
    gradients.push_back(parameter.grad().defined() ? parameter.grad().clone() : torch::Tensor());
  return gradients;
}

inline void check_gradients(const torch::nn::Module& model, const std::vector<torch::Tensor>& expected,
                            const ProcessGroup& group, double tolerance = 1e-12) {
  const auto named = model.named_parameters();
  REQUIRE(named.size() == expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    INFO(named[i].key());
    const torch::Tensor gradient = named[i].value().grad();
    REQUIRE(gradient.defined() == expected[i].defined());
    if (!gradient.defined()) continue;
    const torch::Tensor dense = gradient.is_sparse() ? gradient.to_dense() : gradient;
    const torch::Tensor reference = expected[i].is_sparse() ? expected[i].to_dense() : expected[i];
    CHECK(at::allclose(dense, reference, 0, tolerance));
    check_same_bits_on_all_ranks(group, dense);
  }
}

inline void forget_gradients(torch::nn::Module& model) {
  for (auto& parameter : model.parameters()) parameter.mutable_grad().reset();
}

/// All options that change where gradients are stored.
inline const std::vector<DistributedDataParallelOptions> kMemories = {
    {}, {.arena = false}, {.gradient_as_bucket_view = true}, {.gradient_as_bucket_view = true, .arena = false}};

}  // namespace ddpkit::testing
