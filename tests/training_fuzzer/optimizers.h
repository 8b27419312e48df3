// The optimizers of a case, and what is reported of them.
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

/// An optimizer under the type that a program knows it by: zero_grad() is not virtual.
struct Optimizer {
  std::unique_ptr<torch::optim::Optimizer> base;
  optim::FusedOptimizer* fused = nullptr;
  optim::ShardedOptimizerBase* sharded = nullptr;
};

/// torch::optim's; what it lacks (`maximize`) the caller does.
std::unique_ptr<torch::optim::Optimizer> make_torch_optimizer(const OptimizerChoice& choice,
                                                              const std::vector<at::Tensor>& parameters);
/// As `choice.engine` says. `parameters` as the model lists them; a sharded optimizer takes those of `ddp`.
Optimizer make_optimizer(const OptimizerChoice& choice, const std::vector<at::Tensor>& parameters,
                         DistributedDataParallelBase* ddp);

/// Group `group`'s before a schedule.
double base_rate(const OptimizerChoice& choice, std::size_t group);
/// The schedule of a case: a factor by the number of steps done.
double schedule_factor(std::int64_t steps);

/// "NAME.exp_avg" and so on of every parameter's state.
void report_state(Report& report, std::uint32_t event, const torch::optim::Optimizer& optimizer, Model& model);

/// Appends `tensor`'s values; none for an undefined one.
void report_tensor(Report& report, std::uint32_t event, Kind kind, const std::string& name, const at::Tensor& tensor);

}  // namespace ddpkit::fuzz
