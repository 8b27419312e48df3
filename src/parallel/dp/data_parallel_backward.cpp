// The graph behind the outputs that DataParallel has gathered.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <utility>

#include "parallel/autograd/graph.h"
#include "parallel/dp/data_parallel_impl.h"
#include "parallel/dp/scatter_gather.h"

namespace ddpkit {

using Tensors = std::vector<at::Tensor>;

/// Hangs the outputs on a node of their own, from which edges lead to the inputs and parameters.
Tensors DataParallelBase::Impl::with_graph(Tensors outputs, const Tensors& inputs, ReplicasCall call) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const bool wanted = std::any_of(call.outputs.begin(), call.outputs.end(), [i](const Tensors& of_replica) {
      return of_replica[i].defined() && of_replica[i].requires_grad();
    });
    if (wanted) call.outputs_of.push_back(i);
  }
  if (call.outputs_of.empty()) return outputs;
  torch::autograd::edge_list edges;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined() || !inputs[i].requires_grad()) continue;
    call.wanted_inputs.push_back(i);
    call.wanted_devices.push_back(inputs[i].device());
    edges.push_back(torch::autograd::impl::gradient_edge(inputs[i]));
  }
  for (const at::Tensor& parameter : set->parameters())
    edges.push_back(torch::autograd::impl::gradient_edge(parameter));
  const std::vector<std::size_t> wanted = call.outputs_of;
  const NodePtr node = make_node<ReplicasBackward>(
      std::move(call),
      [self = shared_from_this()](const ReplicasCall& made, const Tensors& gradients, bool keep_graph) {
        return self->run_backward(made, gradients, keep_graph);
      });
  node->set_next_edges(std::move(edges));
  for (const std::size_t i : wanted) torch::autograd::set_history(outputs[i], node);
  return outputs;
}

namespace {

/// Appends the outputs of replica `r` that have come out of the node with a gradient, and those gradients.
void add_roots(const ReplicasCall& call, const Tensors& gradients, std::size_t r, Tensors& roots,
               Tensors& root_gradients) {
  for (std::size_t k = 0; k < gradients.size(); ++k) {
    const at::Tensor& output = call.outputs[r][call.outputs_of[k]];
    if (!gradients[k].defined() || !output.requires_grad()) continue;
    roots.push_back(output);
    root_gradients.push_back(
        gradient_part(gradients[k], call.outputs, call.outputs_of[k], r).to(output.device(), /*non_blocking=*/true));
  }
}

/// The gradient of wanted input `k`, from its parts' gradients. [replica]
at::Tensor join_input_gradient(const ReplicasCall& call, std::size_t k, const Tensors& gradients) {
  Tensors parts;
  bool any = false;
  for (std::size_t r = 0; r < gradients.size(); ++r) {
    any = any || gradients[r].defined();
    const at::Tensor& input = call.inputs[r][call.wanted_inputs[k]];
    parts.push_back((gradients[r].defined() ? gradients[r] : at::zeros_like(input)).to(call.wanted_devices[k]));
  }
  return !any                  ? at::Tensor()
         : parts.size() == 1   ? parts[0]
         : parts[0].dim() == 0 ? at::stack(parts).sum(0)
                               : at::cat(parts);
}

}  // namespace

Tensors DataParallelBase::Impl::run_backward(const ReplicasCall& call, const Tensors& gradients, bool keep_graph) {
  if (streams.used()) return run_backward_on_devices(call, gradients, keep_graph);
  threads_.refuse_nested();
  const std::lock_guard lock(mutex_);
  const int active = static_cast<int>(call.outputs.size());
  ReplicaGradients& sums = call.set->gradients();
  const auto clean = [&] {
    sums.drop();
    for (const Tensors& inputs : call.inputs) {
      for (const std::size_t i : call.wanted_inputs) inputs[i].mutable_grad().reset();
    }
  };
  sums.begin(active);
  try {
    threads_.run(active, [&](int r) {
      sums.take_part(r, [&] {
        Tensors roots, root_gradients;
        add_roots(call, gradients, static_cast<std::size_t>(r), roots, root_gradients);
        sums.start_backward(r);
        if (!roots.empty()) torch::autograd::backward(roots, root_gradients, keep_graph);
      });
    });
  } catch (...) {
    clean();
    throw;
  }
  Tensors results;
  for (std::size_t k = 0; k < call.wanted_inputs.size(); ++k) {
    Tensors parts;
    for (const Tensors& inputs : call.inputs) parts.push_back(inputs[call.wanted_inputs[k]].grad());
    results.push_back(join_input_gradient(call, k, parts));
  }
  for (std::size_t p = 0; p < call.set->parameters().size(); ++p) results.push_back(sums.sum(p));
  clean();
  return results;
}

/// On autograd's thread of the first device. If it waited for the replicas' own threads, their backwards, which need
/// this thread, would never run: instead one backward within this one runs them all, with the other devices' threads.
/// It touches nothing that is shared, since autograd may run another node like this one meanwhile.
Tensors DataParallelBase::Impl::run_backward_on_devices(const ReplicasCall& call, const Tensors& gradients,
                                                        bool keep_graph) {
  const ReplicaStreams::CallerScope scope(streams);
  const std::size_t active = call.outputs.size(), wanted = call.wanted_inputs.size();
  const std::size_t count = call.set->parameters().size();
  Tensors roots, root_gradients, leaves;
  for (std::size_t r = 0; r < active; ++r) {
    add_roots(call, gradients, r, roots, root_gradients);
    for (const std::size_t i : call.wanted_inputs) leaves.push_back(call.inputs[r][i]);
    const Tensors& parameters = call.set->gradients().leaves()[r];
    leaves.insert(leaves.end(), parameters.begin(), parameters.end());
  }
  Tensors results(wanted + count);
  if (roots.empty() || leaves.empty()) return results;
  streams.begin();
  // When it returns, the current streams wait for whatever has made its results.
  const Tensors made = torch::autograd::grad(roots, leaves, root_gradients, keep_graph, /*create_graph=*/false,
                                             /*allow_unused=*/true);
  streams.join();
  for (std::size_t i = 0; i < results.size(); ++i) {
    Tensors of_replicas;
    for (std::size_t r = 0; r < active; ++r) of_replicas.push_back(made[r * results.size() + i]);
    results[i] = i < wanted ? join_input_gradient(call, i, of_replicas) : sum_on_first(of_replicas, devices[0]);
  }
  return results;
}

}  // namespace ddpkit
