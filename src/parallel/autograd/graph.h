// Tier 2: autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/function.h>

namespace ddpkit {

/// What holds a node of autograd's graph: std::shared_ptr to LibTorch 2.14, c10::intrusive_ptr from 2.15 on.
using NodePtr = std::remove_cvref_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;

/// A new node. `Node` is a class derived from torch::autograd::Node.
template <typename Node, typename... Arguments>
NodePtr make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>)
    return std::make_shared<Node>(std::forward<Arguments>(arguments)...);
  else
    return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
}

/// Calls `visit` once for every node from which one of the tensors has come, itself included: depth first through the
/// graph that autograd has recorded, until `visit` returns false.
void visit_graph(const std::vector<at::Tensor>& outputs, const std::function<bool(torch::autograd::Node*)>& visit);

}  // namespace ddpkit
