// Tier 2: torch/optim/sgd.h.
#pragma once

#include <torch/optim/sgd.h>

#include <ddpkit/optim/fused_optimizer.h>

namespace ddpkit::optim {

/// torch::optim::SGD in one pass over memory (see FusedOptimizer): momentum, dampening, Nesterov's momentum (Sutskever
/// and others, ICML 2013), weight decay.
class FusedSGD final : public FusedOptimizerWith<torch::optim::SGDOptions> {
 public:
  using FusedOptimizerWith::FusedOptimizerWith;
};

}  // namespace ddpkit::optim
