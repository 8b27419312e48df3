// Tier 0: the standard library only. Torch's optimizers and archives are declared, not included.
#pragma once

#include <optional>

namespace torch::optim {
class Optimizer;
class OptimizerOptions;
class OptimizerParamGroup;
}  // namespace torch::optim
namespace torch::serialize {
class InputArchive;
}

namespace ddpkit::optim {

/// Reads an archive of an optimizer, of torch::optim's or of ddpkit's. Two things differ from torch::load() of an
/// optimizer of torch::optim: a parameter that a group lists twice counts once (torch::load() crashes the next step),
/// and the groups get their `initial_lr` back. Throws InvalidArgument, with the optimizer as it was, if the archive has
/// other groups or another number of parameters.
void load_archive(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive);

/// Python's `initial_lr` of a parameter group: the learning rate before any schedule. Empty before the first
/// LearningRateScheduler.
std::optional<double> initial_rate(const torch::optim::OptimizerOptions& options);
/// Replaces the group's options by a copy that keeps the rate, in archives too. Without effect on options whose type is
/// none of torch::optim's.
void set_initial_rate(torch::optim::OptimizerParamGroup& group, double rate);

}  // namespace ddpkit::optim
