// Tier 2: torch/optim/adamw.h.
#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <ddpkit/optim/fused_optimizer.h>

namespace ddpkit::optim {

/// torch::optim::AdamW in one pass over memory (see FusedOptimizer), with decoupled weight decay after Loshchilov and
/// Hutter, arXiv 1711.05101; amsgrad after Reddi, Kale and Kumar, arXiv 1904.09237.
///
///     ddpkit::optim::FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3).weight_decay(0.1));
class FusedAdamW final : public FusedOptimizerWith<torch::optim::AdamWOptions> {
 public:
  using FusedOptimizerWith::FusedOptimizerWith;
};

/// torch::optim::Adam in one pass over memory, after Kingma and Ba, arXiv 1412.6980. Weight decay is added to the
/// gradient.
class FusedAdam final : public FusedOptimizerWith<torch::optim::AdamOptions> {
 public:
  using FusedOptimizerWith::FusedOptimizerWith;
};

}  // namespace ddpkit::optim
