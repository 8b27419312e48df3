// Tier 2: torch/csrc/autograd/function.h. What stands in the caller's graph for a forward of all replicas.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace ddpkit {

class ReplicaSet;

/// What one forward has left for its backward.
struct ReplicasCall {
  std::shared_ptr<ReplicaSet> set;
  std::vector<std::vector<at::Tensor>> inputs;   ///< Leaves. [replica][tensor]
  std::vector<std::vector<at::Tensor>> outputs;  ///< With their graphs. [replica][tensor]
  std::vector<std::size_t> wanted_inputs;        ///< Those that want a gradient.
  std::vector<c10::Device> wanted_devices;       ///< Of the caller's tensors behind them.
  std::vector<std::size_t> outputs_of;           ///< The output behind each gradient that the node gets.
};

/// Backward of the joined outputs: hands it to `run`, which returns the gradients of the node's edges.
class ReplicasBackward : public torch::autograd::Node {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Run = std::function<Tensors(const ReplicasCall&, const Tensors& gradients, bool keep_graph)>;
  ReplicasBackward(ReplicasCall call, Run run);

  std::string name() const override { return "DataParallelBackward"; }
  void release_variables() override;
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

 private:
  std::optional<ReplicasCall> call_;
  Run run_;
};

}  // namespace ddpkit
