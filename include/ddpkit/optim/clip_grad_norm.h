// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace ddpkit::optim {

/// Returns each tensor once, in the order of first appearance. If a weight is registered under two names, LibTorch's
/// Module::parameters() lists it twice; Python's lists it once. ddpkit's optimizers, norms and archives count it once.
/// The optimizers of torch::optim update it twice per step: pass them distinct_parameters(model->parameters()).
std::vector<at::Tensor> distinct_parameters(const std::vector<at::Tensor>& parameters);

/// Returns the norm of order `norm_type` over all gradients, as if they were one vector. The order may be infinity or
/// any positive number. Reads memory once. The result has the same bits for any number of threads. Parameters without a
/// gradient are ignored; parameters that are listed twice count once. On CUDA it waits for the device. Throws
/// InvalidArgument if a ShardedOptimizer holds the gradients, because they are then not in the parameters.
double grad_norm(const std::vector<at::Tensor>& parameters, double norm_type = 2.0);

/// Scales all gradients in place so that their norm is at most `max_norm`. Returns the norm before scaling. Same as
/// Python's torch.nn.utils.clip_grad_norm_, after Pascanu, Mikolov and Bengio, arXiv 1211.5063. Reads the gradients
/// once, and writes them only if it clips. Not collective: after DistributedDataParallel's backward the gradients are
/// the same on every rank, and so is the result. Throws like grad_norm(), InvalidArgument if `norm_type` is not
/// positive, and, with `error_if_nonfinite`, if the norm is infinite or NaN.
double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0,
                       bool error_if_nonfinite = false);

/// The second half of clip_grad_norm_(), for a norm that is known: scales all gradients in place by `max_norm` /
/// `total_norm`, but at most by 1. Same as Python's torch.nn.utils.clip_grads_with_norm_. Not collective.
void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double total_norm,
                           bool error_if_nonfinite = false);

}  // namespace ddpkit::optim
