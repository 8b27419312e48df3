// Tier 2: torch/nn/module.h. The graph of the gathered outputs of DataParallel.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "parallel/dp/replica_streams.h"
#include "parallel/dp/replica_threads.h"
#include "parallel/dp/replicas.h"

namespace ddpkit {

/// One forward of all replicas, kept for its backward.
struct ReplicasCall {
  std::shared_ptr<Replicas> set;
  std::vector<std::vector<at::Tensor>> inputs;   ///< Leaves. [replica][tensor]
  std::vector<std::vector<at::Tensor>> outputs;  ///< With their graphs. [replica][tensor]
  std::vector<std::size_t> wanted_inputs = {};   ///< The inputs that require a gradient.
  std::vector<c10::Device> wanted_devices = {};  ///< Devices of the caller's tensors for these inputs.
  std::vector<std::size_t> outputs_of = {};      ///< The output of each gradient that the node receives.
};

/// Returns the gradients of the wanted inputs, then of the parameters.
using RunBackward = std::function<std::vector<at::Tensor>(const ReplicasCall&, const std::vector<at::Tensor>& gradients,
                                                          bool keep_graph)>;

/// Gives the gathered `outputs` a graph node that calls `run`. The node has edges to `inputs` and to the module's
/// parameters.
void connect_graph(std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs, ReplicasCall call,
                   RunBackward run);

/// For replicas on the CPU: runs backward in the threads of the replicas.
std::vector<at::Tensor> backward_in_threads(const ReplicasCall& call, const std::vector<at::Tensor>& gradients,
                                            bool keep_graph, ReplicaThreads& threads);
/// Runs on autograd's thread of the first device. Waiting for the replicas' threads would deadlock, because their
/// backwards need this thread. So one nested backward runs all replicas, with the other devices' threads. It changes no
/// shared state, because autograd may run another such node at the same time.
std::vector<at::Tensor> backward_on_devices(const ReplicasCall& call, const std::vector<at::Tensor>& gradients,
                                            bool keep_graph, const ReplicaStreams& streams);

}  // namespace ddpkit
