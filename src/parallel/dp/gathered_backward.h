// Tier 2: torch/nn/module.h. The graph behind the outputs that DataParallel has gathered.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "parallel/dp/replica_set.h"
#include "parallel/dp/replica_streams.h"
#include "parallel/dp/replica_threads.h"

namespace ddpkit {

/// One forward of all replicas, kept for its backward.
struct ReplicasCall {
  std::shared_ptr<ReplicaSet> set;
  std::vector<std::vector<at::Tensor>> inputs;   ///< Leaves. [replica][tensor]
  std::vector<std::vector<at::Tensor>> outputs;  ///< With their graphs. [replica][tensor]
  std::vector<std::size_t> wanted_inputs = {};   ///< The inputs that require a gradient.
  std::vector<c10::Device> wanted_devices = {};  ///< Of the caller's tensors behind these inputs.
  std::vector<std::size_t> outputs_of = {};      ///< The output behind each gradient that the node receives.
};

/// Returns the gradients of the wanted inputs, then of the parameters.
using RunBackward = std::function<std::vector<at::Tensor>(const ReplicasCall&, const std::vector<at::Tensor>& gradients,
                                                          bool keep_graph)>;

/// Gives the gathered `outputs` a graph node that calls `run`. Edges lead from the node to `inputs` and to the module's
/// parameters.
void connect_graph(std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs, ReplicasCall call,
                   RunBackward run);

/// For replicas on the CPU: runs backward in the threads of the replicas.
std::vector<at::Tensor> backward_in_threads(const ReplicasCall& call, const std::vector<at::Tensor>& gradients,
                                            bool keep_graph, ReplicaThreads& threads);
/// On autograd's thread of the first device. If this thread waited for the threads of the replicas, their backwards,
/// which need this thread, would never run. So one nested backward runs all replicas, with the other devices' threads.
/// It changes nothing that is shared, because autograd may run another such node at the same time.
std::vector<at::Tensor> backward_on_devices(const ReplicasCall& call, const std::vector<at::Tensor>& gradients,
                                            bool keep_graph, const ReplicaStreams& streams);

}  // namespace ddpkit
