// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace ddpkit::optim {

/// Each tensor once, in the order in which they appear first. LibTorch's Module::parameters() lists a weight that is
/// registered under two names twice; Python's lists it once. ddpkit's optimizers, norms and archives count a parameter
/// once. torch::optim's optimizers update it twice per step: pass them distinct_parameters(model->parameters()).
std::vector<at::Tensor> distinct_parameters(const std::vector<at::Tensor>& parameters);

/// The norm of order `norm_type` of all gradients as if they were one vector, in one pass over memory and with the same
/// bits whatever the number of threads. Of order 2, 1 or infinity, or any other positive one. Parameters without a
/// gradient count as nothing, parameters that are listed twice count once. On CUDA it waits for the device. Throws
/// InvalidArgument if a ShardedOptimizer takes the gradients: they are not in the parameters.
double grad_norm(const std::vector<at::Tensor>& parameters, double norm_type = 2.0);

/// Scales all gradients down, in place, so that their norm is at most `max_norm`, and returns the norm they had:
/// Python's torch.nn.utils.clip_grad_norm_, by Pascanu, Mikolov and Bengio, arXiv 1211.5063. Reads them once, and
/// writes them only where there is something to clip. Not collective: after DistributedDataParallel's backward the
/// gradients are the same on every rank, and so is the result. Throws as grad_norm(), InvalidArgument where `norm_type`
/// is not positive, and with `error_if_nonfinite` where the norm is infinite or NaN.
double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0,
                       bool error_if_nonfinite = false);

/// Multiplies all gradients by `factor` in place.
void scale_gradients_(const std::vector<at::Tensor>& parameters, double factor);

/// What clip_grad_norm_() multiplies gradients of norm `norm` by: at most 1. Throws as it does.
double clip_factor(double norm, double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false);

}  // namespace ddpkit::optim
