// The optimizers of a case, and their reports.
#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include <ddpkit/optim/fused_optimizer.h>
#include <ddpkit/optim/sharded_optimizer.h>

#include "case.h"
#include "model.h"
#include "report.h"

namespace ddpkit::fuzz {

/// An optimizer with its static type: zero_grad() is not virtual.
struct Optimizer {
  std::unique_ptr<torch::optim::Optimizer> base;
  optim::FusedOptimizer* fused = nullptr;
  optim::ShardedOptimizerBase* sharded = nullptr;
};

/// Creates an optimizer of torch::optim. The caller must implement `maximize`, which torch::optim lacks.
std::unique_ptr<torch::optim::Optimizer> make_torch_optimizer(const OptimizerChoice& choice,
                                                              const std::vector<at::Tensor>& parameters);
/// Creates the optimizer of `choice.engine`. `parameters` in the model's order; a sharded optimizer takes those of
/// `ddp`.
Optimizer make_optimizer(const OptimizerChoice& choice, const std::vector<at::Tensor>& parameters,
                         DistributedDataParallelBase* ddp);

/// Returns the learning rate of group `group` before a schedule.
double base_rate(const OptimizerChoice& choice, std::size_t group);
/// The schedule of a case: a factor as a function of the finished steps.
double schedule_factor(std::int64_t steps);

/// Reports "NAME.exp_avg" and other state of every parameter.
void report_state(Report& report, std::uint32_t event, const torch::optim::Optimizer& optimizer, Model& model);

/// Appends the values of `tensor`; none if it is undefined.
void report_tensor(Report& report, std::uint32_t event, Kind kind, const std::string& name, const at::Tensor& tensor);

}  // namespace ddpkit::fuzz
