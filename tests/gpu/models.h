#pragma once

#include <torch/torch.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ddpkit/ddpkit.h>

#include "support/ranks.h"

namespace gpu {

/// Runs `body` on several ranks, each with its GPU. `environment` is added to the ranks' environment.
inline void on_gpus(const std::string& name, int ranks, const std::function<void(ddpkit::ProcessGroup&)>& body,
                    const std::vector<std::pair<std::string, std::string>>& environment = {},
                    const std::vector<int>& doomed = {}) {
  ddpkit::testing::on_ranks(name, ranks, body,
                            {.backend = "nccl", .device = torch::kCUDA, .doomed = doomed, .environment = environment});
}

constexpr auto kGpu = torch::kCUDA;

inline torch::TensorOptions doubles() { return torch::TensorOptions(torch::kDouble).device(torch::Device(kGpu, 0)); }

inline torch::nn::Sequential net() {
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(12, 40), torch::nn::Tanh(), torch::nn::Linear(40, 40), torch::nn::Tanh(),
                            torch::nn::Linear(40, 40), torch::nn::Tanh(), torch::nn::Linear(40, 3));
  net->to(torch::Device(kGpu, 0), torch::kDouble);
  return net;
}

/// Options for buckets of about one layer each.
inline ddpkit::DistributedDataParallelOptions small_buckets() {
  return {.bucket_cap_mb = 0.01, .first_bucket_cap_mb = 0.001};
}

inline ddpkit::ProcessGroup world_of_one() {
  return ddpkit::init_process_group({.backend = "nccl", .environment = ddpkit::LaunchEnvironment{}});
}

/// Returns the batch of a step, equal in every process.
inline torch::Tensor batch(int step, std::int64_t samples) {
  torch::manual_seed(100 + step);
  return torch::randn({samples, 12}, torch::kDouble).to(torch::Device(kGpu, 0));
}

inline torch::Tensor loss_of(const torch::Tensor& output) { return output.pow(2).mean() + output.sin().mean(); }

inline void check_same(const std::vector<torch::Tensor>& ours, const std::vector<torch::Tensor>& reference,
                       double tolerance = 1e-12) {
  REQUIRE(ours.size() == reference.size());
  for (std::size_t i = 0; i < ours.size(); ++i) {
    INFO("tensor " << i);
    CHECK(torch::allclose(ours[i], reference[i], 0, tolerance));
  }
}

}  // namespace gpu
