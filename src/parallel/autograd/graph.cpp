#include "parallel/autograd/graph.h"

#include <torch/csrc/autograd/variable.h>

#include <unordered_set>

namespace ddpkit {

void visit_graph(const std::vector<at::Tensor>& outputs, const std::function<bool(torch::autograd::Node*)>& visit) {
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
