// Tier 2: autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include <torch/csrc/autograd/function.h>

namespace ddpkit {

/// Calls `visit` once for every node from which one of the tensors has come, itself included: depth first through the
/// graph that autograd has recorded, until `visit` returns false.
void visit_graph(const std::vector<at::Tensor>& outputs, const std::function<bool(torch::autograd::Node*)>& visit);

}  // namespace ddpkit
