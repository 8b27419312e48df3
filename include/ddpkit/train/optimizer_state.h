// Tier 1: ATen/core/Tensor.h. Torch's optimizer is only declared.
#pragma once

#include <ddpkit/train/state_dict.h>

namespace torch::optim {
class Optimizer;
}

namespace ddpkit::train {

/// Returns the optimizer's state in the layout of Python's Optimizer.state_dict(), which Python's optimizer of the same
/// kind can load: {'state': {index: {'step', 'exp_avg', 'exp_avg_sq' ...}}, 'param_groups': [...]}. Parameters are
/// numbered through the groups, each once. After a LearningRateScheduler has been made, groups have `initial_lr`.
/// Supports torch::optim's AdamW, Adam and SGD, their fused counterparts, and a ShardedOptimizer after
/// consolidate_state(), whose state is that of a process without sharding. Tensors are copies. Throws InvalidArgument
/// for other optimizers, and on a rank without consolidated state.
StateDict optimizer_state(const torch::optim::Optimizer& optimizer);

/// Loads a state from optimizer_state() or from Python's optimizer of the same kind. Loads the state of each parameter,
/// in the parameter's type and on its device, and the options of the groups. Skips options that LibTorch does not have
/// (foreach, fused, capturable, differentiable). A ShardedOptimizer keeps its part: call it on all ranks with the whole
/// state. Throws InvalidArgument, and changes nothing, if groups, parameters or shapes differ, if a key is missing, or
/// if maximize differs.
void load_optimizer_state(torch::optim::Optimizer& optimizer, const StateDict& state);

}  // namespace ddpkit::train
