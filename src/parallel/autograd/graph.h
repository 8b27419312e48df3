// Tier 2: autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

namespace ddpkit {

/// Owning pointer to a node of autograd's graph: std::shared_ptr up to LibTorch 2.14, c10::intrusive_ptr from 2.15 on.
using NodePtr = std::remove_cvref_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;
/// Does not own the node. lock() returns a NodePtr.
using WeakNodePtr =
    std::conditional_t<std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>,
                       std::weak_ptr<torch::autograd::Node>, c10::weak_intrusive_ptr<torch::autograd::Node>>;

/// Creates a node. `Node` is a class derived from torch::autograd::Node.
template <typename Node, typename... Arguments>
NodePtr make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>)
    return std::make_shared<Node>(std::forward<Arguments>(arguments)...);
  else
    return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
}

/// Calls `visit` once per node in the graph of the tensors, including their own nodes: depth first, until `visit`
/// returns false.
inline void visit_graph(const std::vector<at::Tensor>& outputs,
                        const std::function<bool(torch::autograd::Node*)>& visit) {
  std::unordered_set<torch::autograd::Node*> seen;
  std::vector<torch::autograd::Node*> stack;
  const auto push = [&](torch::autograd::Node* node) {
    if (node && seen.insert(node).second) stack.push_back(node);
  };
  for (const at::Tensor& output : outputs) {
    if (output.defined()) push(torch::autograd::impl::gradient_edge(output).function.get());
  }
  while (!stack.empty()) {
    torch::autograd::Node* node = stack.back();
    stack.pop_back();
    if (!visit(node)) return;
    for (const auto& edge : node->next_edges()) push(edge.function.get());
  }
}

}  // namespace ddpkit
