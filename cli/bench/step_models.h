// Tier 2: torch/nn/module.h.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace ddpkit {
class DistributedDataParallelBase;
}
namespace ddpkit::optim {
class FusedOptimizer;
}

namespace ddpkit::bench {

/// A model that classifies: from a batch to one row of logits each prediction.
class StepModel : public torch::nn::Module {
 public:
  virtual at::Tensor forward(const at::Tensor& input) = 0;
};

/// A model with one rank's batch. The same weights on every rank, a batch of its own.
struct StepTask {
  std::shared_ptr<StepModel> model;
  at::Tensor input;
  at::Tensor target;
};

/// `model`: an argument of model_argument(). The same numbers on every device. benchmarks/peers/step.py has the same
/// models. Throws InvalidArgument.
StepTask make_step_task(const std::string& model, std::int64_t batch, int rank, c10::Device device = at::kCPU);

/// What a step needs of an optimizer: one that is no torch::optim::Optimizer can be measured too.
struct StepOptimizer {
  std::function<void()> zero_grad;
  std::function<void()> step;
  optim::FusedOptimizer* capturable = nullptr;  ///< The one behind them, where a CUDA graph may hold its step.
};

/// `name`: "sgd" or "adamw"; `update`: torch's, ddpkit's fused one, or that one capturable. Throws InvalidArgument.
StepOptimizer make_step_optimizer(const std::string& name, const std::string& update,
                                  std::vector<at::Tensor> parameters);
/// ddpkit's fused one, sharded over the ranks of `ddp`.
StepOptimizer make_sharded_step_optimizer(const std::string& name, bool in_backward, DistributedDataParallelBase& ddp);

}  // namespace ddpkit::bench
