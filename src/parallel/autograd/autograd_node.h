// Tier 1: ATen/core/Tensor.h. How autograd's nodes are held.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <type_traits>
#include <utility>

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

}  // namespace ddpkit
