// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace ddpkit::optim {

/// Each tensor once, in the order in which they appear first. LibTorch's Module::parameters() lists a weight that is
/// registered under two names twice; Python's lists it once. ddpkit's optimizers, norms and archives count a parameter
/// once. torch::optim's optimizers update it twice per step: pass them distinct_parameters(model->parameters()).
std::vector<at::Tensor> distinct_parameters(const std::vector<at::Tensor>& parameters);

}  // namespace ddpkit::optim
