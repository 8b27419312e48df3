// A model of many layers of equal size, whose gradients arrive one after the other.
#pragma once

#include <torch/torch.h>

namespace ddpkit::testing {

/// Returns six layers of 300 by 300: 90,300 parameters each.
inline torch::nn::Sequential deep_model() {
  torch::manual_seed(0);
  torch::nn::Sequential model;
  for (int layer = 0; layer < 6; ++layer) model->push_back(torch::nn::Linear(300, 300));
  return model;
}

}  // namespace ddpkit::testing
