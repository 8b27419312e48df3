// Parameters of all layouts and their gradients, to compare two optimizers.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include "optim/fused_optimizer.h"
#include "support/catch.h"

namespace ddpkit::testing {

/// Returns the optimizer's state as it is in memory.
inline const std::vector<optim::FlatState>& flat_state(const optim::FusedOptimizer& optimizer) {
  return optim::FusedOptimizer::Impl::of(optimizer).flat_state();
}

/// Returns contiguous, transposed, channels-last, one-element, empty, and several blocks long parameters, and a part of
/// a larger tensor.
inline std::vector<torch::Tensor> make_parameters(torch::ScalarType dtype) {
  torch::manual_seed(0);
  const auto values = [&](torch::IntArrayRef sizes) { return torch::randn(sizes, torch::kDouble).to(dtype); };
  std::vector<torch::Tensor> parameters{
      values({7, 5}),
      values({9, 4}).t(),
      values({2, 3, 4, 5}).contiguous(torch::MemoryFormat::ChannelsLast),
      values({}),
      values({0, 3}),
      values({50001}),
      values({6, 8}).slice(1, 1, 5),
  };
  for (auto& parameter : parameters) parameter.requires_grad_(true);
  return parameters;
}

/// Returns copies with the same values and layouts.
inline std::vector<torch::Tensor> copies_of(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> copies;
  for (const auto& parameter : parameters) {
    const torch::NoGradGuard no_grad;
    auto copy = torch::empty_strided(parameter.sizes(), parameter.strides(), parameter.options().requires_grad(false));
    copy.copy_(parameter);
    copies.push_back(copy.requires_grad_(true));
  }
  return copies;
}

/// Sets new gradients for both. In some steps, some parameters have no gradient or a gradient of another layout.
inline void set_gradients(int step, const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  torch::manual_seed(static_cast<std::uint64_t>(1000 + step));
  for (std::size_t i = 0; i < a.size(); ++i) {
    const auto gradient = (torch::randn(a[i].sizes(), torch::kDouble) + 0.3).to(a[i].scalar_type());
    if ((static_cast<std::size_t>(step) + i) % 5 == 0 || (i == 1 && step < 3)) {
      a[i].mutable_grad() = b[i].mutable_grad() = torch::Tensor();
      continue;
    }
    a[i].mutable_grad() = gradient;
    b[i].mutable_grad() = gradient.clone();
  }
}

/// Runs both optimizers with the same gradients, for steps `begin` to `end` - 1.
template <class A, class B>
void take_steps(int begin, int end, const std::vector<torch::Tensor>& parameters, A& optimizer,
                const std::vector<torch::Tensor>& references, B& reference) {
  for (int step = begin; step < end; ++step) {
    set_gradients(step, parameters, references);
    optimizer.step();
    reference.step();
  }
}

inline double relative_difference(const torch::Tensor& a, const torch::Tensor& b) {
  if (a.numel() == 0) return 0;
  const auto wide_a = a.detach().to(torch::kDouble), wide_b = b.detach().to(torch::kDouble);
  return ((wide_a - wide_b).abs().max() / wide_b.abs().max().clamp_min(1e-30)).item<double>();
}

inline void check_same(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b, double tolerance) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    INFO("parameter " << i);
    CHECK(relative_difference(a[i], b[i]) < tolerance);
  }
}

}  // namespace ddpkit::testing
