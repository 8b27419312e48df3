#include "parallel/autograd/backward_tracker.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

namespace ddpkit {

/// Calls back before a node runs.
struct BackwardTracker::NodeHook : torch::autograd::FunctionPreHook {
  explicit NodeHook(Action call) : call(std::move(call)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    call();
    return gradients;
  }
  Action call;
};

BackwardTracker::BackwardTracker(std::weak_ptr<void> owner, std::recursive_mutex& mutex, const GradientHooks& hooks,
                                 Action on_end)
    : owner_(std::move(owner)), mutex_(mutex), hooks_(hooks), on_end_(std::move(on_end)) {}

/// The graph may outlive the owner.
BackwardTracker::Action BackwardTracker::guarded(Action action) const {
  return [this, owner = owner_, action = std::move(action)] {
    const auto alive = owner.lock();
    if (!alive) return;
    const std::lock_guard lock(mutex_);
    action();
  };
}

void BackwardTracker::at_outputs(const std::vector<at::Tensor>& outputs, bool leaves_too, Action action) const {
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad() || (output.is_leaf() && !leaves_too)) continue;
    output.register_hook([call = guarded(action)](const at::Tensor&) { call(); });
  }
}

void BackwardTracker::note_output_reached() { output_task_ = torch::autograd::get_current_graph_task_id(); }

void BackwardTracker::enter() {
  if (torch::autograd::get_current_graph_task_id() != end_task_) queue_end();
}

/// The end comes after all nodes of the graph: on the CPU on the thread that called backward(), else on autograd's
/// thread of the device. The current stream is the caller's. This stream then waits for the streams of all hooks.
void BackwardTracker::queue_end() {
  end_task_ = torch::autograd::get_current_graph_task_id();
  waits_for_outer_ = false;
  auto alive = alive_.lock();
  if (!alive) alive_ = alive = std::make_shared<char>();
  torch::autograd::Engine::get_default_engine().queue_callback([this, owner = owner_.lock(), alive = std::move(alive)] {
    const std::lock_guard lock(mutex_);
    on_end_();
  });
}

/// The nodes after the outer backward's current node run in the outer graph task, and queue the end there.
bool BackwardTracker::continues_outside() {
  // This thread has a current node only if a node of another backward runs this backward. This holds while the engine's
  // nesting depth does not exceed its number of threads.
  const NodePtr outer = torch::autograd::get_current_node();
  if (!outer || torch::autograd::get_current_graph_task_id() == output_task_) return false;
  for (const torch::autograd::Edge& edge : outer->next_edges()) {
    if (!edge.is_valid()) continue;
    waits_for_outer_ = true;
    if (hooks_.leaf_of(edge.function.get())) continue;  // The hook on the gradient calls enter().
    auto hook = std::make_unique<NodeHook>(guarded([this] {
      if (will_end()) enter();
    }));
    outer_hooks_.emplace_back(edge.function, hook.get());
    auto& hooks = edge.function->tensor_pre_hooks();
    hooks.insert(hooks.begin(), std::move(hook));  // Before any hook that may throw.
  }
  return waits_for_outer_;
}

bool BackwardTracker::inside_backward() { return torch::autograd::get_current_graph_task_id() >= 0; }

void BackwardTracker::reset() noexcept {
  waits_for_outer_ = false;
  end_task_ = output_task_ = -1;
  alive_.reset();
  for (const auto& [weak, hook] : outer_hooks_) {
    if (const NodePtr node = weak.lock())
      std::erase_if(node->tensor_pre_hooks(), [hook = hook](const auto& one) { return one.get() == hook; });
  }
  outer_hooks_.clear();
}

}  // namespace ddpkit
