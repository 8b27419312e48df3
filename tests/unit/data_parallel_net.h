// A network for the tests of DataParallel, and a comparison of gradients.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <stdexcept>

#include "support/catch.h"

namespace ddpkit::testing {

constexpr double kTolerance = 1e-10;

/// Throws on a sample equal to fails_at; no forward uses `unused`.
struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { reset(); }  // NOLINT(clang-analyzer-optin.cplusplus.VirtualCall)
  void reset() override {
    first = register_module("first", torch::nn::Linear(6, 40));
    second = register_module("second", torch::nn::Linear(40, 30));
    last = register_module("last", torch::nn::Linear(30, 3));
    unused = register_module("unused", torch::nn::Linear(2, 2));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    if (fails_at >= 0 && (x == fails_at).any().item<bool>()) throw std::runtime_error("the sample is bad");
    return last(torch::tanh(second(torch::tanh(first(x)))));
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, last{nullptr}, unused{nullptr};
  double fails_at = -1;
};
TORCH_MODULE(Net);

inline Net make_net() {
  torch::manual_seed(5);
  Net net;
  net->to(torch::kDouble);
  return net;
}

inline torch::Tensor batch_of(std::int64_t samples, std::uint64_t seed = 1) {
  torch::manual_seed(seed);
  return torch::randn({samples, 6}, torch::kDouble);
}

inline torch::Tensor loss_of(const torch::Tensor& output) { return (output - 0.5).pow(2).mean(); }

inline const auto kStepLoss = [](auto& replica, const torch::Tensor& part) { return loss_of(replica.forward(part)); };

/// Also checks that the same parameters have no gradient.
template <class Module>
void check_same_gradients(const Module& module, const Module& reference) {
  const auto mine = module->named_parameters();
  const auto wanted = reference->named_parameters();
  for (const auto& item : wanted) {
    INFO(item.key());
    REQUIRE(mine[item.key()].grad().defined() == item.value().grad().defined());
    if (item.value().grad().defined()) CHECK(at::allclose(mine[item.key()].grad(), item.value().grad(), 0, kTolerance));
  }
}

}  // namespace ddpkit::testing
