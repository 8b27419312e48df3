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

/// A classifier. Returns one row of logits per prediction.
class StepModel : public torch::nn::Module {
 public:
  virtual at::Tensor forward(const at::Tensor& input) = 0;
};

/// A model and the batch of one rank. All ranks have the same weights and different batches.
struct StepTask {
  std::shared_ptr<StepModel> model;
  at::Tensor input;
  at::Tensor target;
};

/// Creates a task. `model`: a result of model_argument(). Weights and batch are equal on every device. `checkpoint`:
/// the layers of a transformer run again in backward. benchmarks/peers/step.py has the same models. Throws
/// InvalidArgument.
StepTask make_step_task(const std::string& model, std::int64_t batch, int rank, c10::Device device = at::kCPU,
                        bool checkpoint = false);

/// The functions of an optimizer that a step needs. Also wraps optimizers that are not a torch::optim::Optimizer.
struct StepOptimizer {
  std::function<void()> zero_grad;
  std::function<void()> step;
  optim::FusedOptimizer* capturable = nullptr;  ///< The wrapped optimizer, if a CUDA graph can capture its step.
};

/// Creates an optimizer. `name`: "sgd" or "adamw". `update`: torch's, ddpkit's fused optimizer, or a capturable fused
/// optimizer. Throws InvalidArgument.
StepOptimizer make_step_optimizer(const std::string& name, const std::string& update,
                                  std::vector<at::Tensor> parameters);
/// Creates ddpkit's fused optimizer, sharded over the ranks of `ddp`. `update`: kShardedUpdate, kInBackwardUpdate or
/// kFsdpUpdate.
StepOptimizer make_sharded_step_optimizer(const std::string& name, const std::string& update,
                                          DistributedDataParallelBase& ddp);

}  // namespace ddpkit::bench
