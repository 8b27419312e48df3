#include "parallel/dp/replicas_backward.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <mutex>
#include <utility>

#include <ddpkit/error.h>

namespace ddpkit {

ReplicasBackward::ReplicasBackward(ReplicasCall call, Run run) : call_(std::move(call)), run_(std::move(run)) {}

void ReplicasBackward::release_variables() {
  const std::lock_guard lock(mutex_);
  call_.reset();
}

torch::autograd::variable_list ReplicasBackward::apply(torch::autograd::variable_list&& gradients) {
  const std::lock_guard lock(mutex_);
  if (!call_) throw Error("a second backward through DataParallel's outputs: give the first one retain_graph=true");
  if (c10::GradMode::is_enabled())
    throw Error(
        "backward(create_graph=true) through DataParallel's outputs is not possible: take second derivatives within "
        "train_step()'s loss function, or of the module itself");
  return run_(*call_, gradients, torch::autograd::get_current_graph_task_keep_graph());
}

}  // namespace ddpkit
