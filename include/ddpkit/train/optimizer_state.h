// Tier 1: ATen/core/Tensor.h. Torch's optimizer is declared, not included.
#pragma once

#include <ddpkit/train/state_dict.h>

namespace torch::optim {
class Optimizer;
}

namespace ddpkit::train {

/// The optimizer's state in the layout of Python's Optimizer.state_dict(), which Python's optimizer of the same kind
/// loads: {'state': {index: {'step', 'exp_avg', 'exp_avg_sq' ...}}, 'param_groups': [...]}, parameters counted through
/// the groups, each once, and with `initial_lr` once a LearningRateScheduler has been made. Of torch::optim's AdamW,
/// Adam and SGD, of their fused counterparts, and of a ShardedOptimizer after consolidate_state(), which gives what a
/// process alone would. Tensors are copies. Throws InvalidArgument for another optimizer, and on a rank without
/// consolidated state.
StateDict optimizer_state(const torch::optim::Optimizer& optimizer);

/// Gives the optimizer such a state, from here or from Python's optimizer of the same kind: the state of each
/// parameter, in the parameter's type and on its device, and the options of the groups; what LibTorch's options have no
/// room for (foreach, fused, capturable, differentiable) is skipped. A ShardedOptimizer keeps its part:
/// call it on all ranks, with the whole state. Throws InvalidArgument, with the optimizer as it was, when groups,
/// parameters or shapes are other ones, something is missing, or maximize differs.
void load_optimizer_state(torch::optim::Optimizer& optimizer, const StateDict& state);

}  // namespace ddpkit::train
