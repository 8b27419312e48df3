#include "parallel/dp/gathered_backward.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include <ddpkit/error.h>

#include "parallel/autograd/graph.h"
#include "parallel/dp/scatter_gather.h"

namespace ddpkit {
namespace {

using Tensors = std::vector<at::Tensor>;

class GatheredBackward : public torch::autograd::Node {
 public:
  GatheredBackward(ReplicasCall call, RunBackward run) : call_(std::move(call)), run_(std::move(run)) {}

  std::string name() const override { return "DataParallelBackward"; }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    call_.reset();
  }

  Tensors apply(Tensors&& gradients) override {
    const std::lock_guard lock(mutex_);
    if (!call_) throw Error("a second backward through DataParallel's outputs: give the first one retain_graph=true");
    if (c10::GradMode::is_enabled())
      throw Error(
          "backward(create_graph=true) through DataParallel's outputs is not possible: take second derivatives within "
          "train_step()'s loss function, or of the module itself");
    return run_(*call_, gradients, torch::autograd::get_current_graph_task_keep_graph());
  }

 private:
  std::optional<ReplicasCall> call_;
  RunBackward run_;
};

/// Appends the outputs of replica `r` that have a gradient, and these gradients.
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

/// Returns the gradient of wanted input `k`, joined from the gradients of its parts. [replica]
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

void connect_graph(Tensors& outputs, const Tensors& inputs, ReplicasCall call, RunBackward run) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const bool wanted = std::any_of(call.outputs.begin(), call.outputs.end(), [i](const Tensors& of_replica) {
      return of_replica[i].defined() && of_replica[i].requires_grad();
    });
    if (wanted) call.outputs_of.push_back(i);
  }
  if (call.outputs_of.empty()) return;
  torch::autograd::edge_list edges;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined() || !inputs[i].requires_grad()) continue;
    call.wanted_inputs.push_back(i);
    call.wanted_devices.push_back(inputs[i].device());
    edges.push_back(torch::autograd::impl::gradient_edge(inputs[i]));
  }
  for (const at::Tensor& parameter : call.set->parameters())
    edges.push_back(torch::autograd::impl::gradient_edge(parameter));
  const std::vector<std::size_t> wanted = call.outputs_of;
  const NodePtr node = make_node<GatheredBackward>(std::move(call), std::move(run));
  node->set_next_edges(std::move(edges));
  for (const std::size_t i : wanted) torch::autograd::set_history(outputs[i], node);
}

Tensors backward_in_threads(const ReplicasCall& call, const Tensors& gradients, bool keep_graph,
                            ReplicaThreads& threads) {
  const int active = static_cast<int>(call.outputs.size());
  GradientSum& sums = call.set->gradients();
  const auto clean = [&] {
    sums.drop();
    for (const Tensors& inputs : call.inputs) {
      for (const std::size_t i : call.wanted_inputs) inputs[i].mutable_grad().reset();
    }
  };
  sums.begin(active);
  try {
    threads.run(active, [&](int r) {
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

Tensors backward_on_devices(const ReplicasCall& call, const Tensors& gradients, bool keep_graph,
                            const ReplicaStreams& streams) {
  const ReplicaStreams::CallerScope scope(streams);
  const std::size_t active = call.outputs.size(), wanted = call.wanted_inputs.size();
  const std::vector<Tensors>& parameters = call.set->gradients().leaves();
  Tensors roots, root_gradients, leaves;
  for (std::size_t r = 0; r < active; ++r) {
    add_roots(call, gradients, r, roots, root_gradients);
    for (const std::size_t i : call.wanted_inputs) leaves.push_back(call.inputs[r][i]);
    leaves.insert(leaves.end(), parameters[r].begin(), parameters[r].end());
  }
  Tensors results(wanted + parameters[0].size());
  if (roots.empty() || leaves.empty()) return results;
  streams.begin();
  // At return, the current streams wait for the streams that computed the results.
  const Tensors made = torch::autograd::grad(roots, leaves, root_gradients, keep_graph, /*create_graph=*/false,
                                             /*allow_unused=*/true);
  streams.join();
  for (std::size_t i = 0; i < results.size(); ++i) {
    Tensors of_replicas;
    for (std::size_t r = 0; r < active; ++r) of_replicas.push_back(made[r * results.size() + i]);
    results[i] = i < wanted ? join_input_gradient(call, i, of_replicas)
                            : sum_on_first(of_replicas, parameters[0][i - wanted].device());
  }
  return results;
}

}  // namespace ddpkit
