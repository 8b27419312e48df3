// Where a backward begins and ends: in one graph task of autograd, or in several, of which one runs within another.
#include "parallel/ddp/reducer_impl.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <fmt/format.h>

#include "parallel/model_agreement.h"

namespace ddpkit {
namespace {

/// Calls back before a node runs.
struct NodeHook : torch::autograd::FunctionPreHook {
  explicit NodeHook(std::function<void()> call) : call(std::move(call)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    call();
    return gradients;
  }
  std::function<void()> call;
};

}  // namespace

/// Before a gradient counts, or when backward reaches an output of a forward that may use no parameter.
void Reducer::Impl::enter_backward() {
  end_abandoned_backward();
  if (!in_backward_) begin_backward();
  if (torch::autograd::get_current_graph_task_id() != end_task_) queue_end();
}

/// Something else in the graph threw.
bool Reducer::Impl::backward_has_died() const {
  return in_backward_ && !shadows_ && !waits_for_outer_ && alive_.expired();
}

/// Ends a backward that has begun and will not end. What a backward itself calls is part of a backward that continues,
/// such as the forward pass of a checkpoint.
void Reducer::Impl::end_abandoned_backward() {
  if (!in_backward_ || (!backward_has_died() && torch::autograd::get_current_graph_task_id() >= 0)) return;
  // The other ranks may still write into what has been passed to them.
  for (Bucket& bucket : buckets_) {
    if (bucket.work.valid()) bucket.work.wait();
  }
  forget_backward();
}

/// At the end of the backward that runs here. It runs when the whole graph has been walked: on the CPU on the thread
/// that called backward(), else on autograd's own of the device, with that caller's current stream, which then waits
/// for the streams of all hooks.
void Reducer::Impl::queue_end() {
  end_task_ = torch::autograd::get_current_graph_task_id();
  waits_for_outer_ = false;
  auto alive = alive_.lock();
  if (!alive) alive_ = alive = std::make_shared<char>();
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this(), alive = std::move(alive)] { self->end_backward(); });
}

/// `node` has run a backward within the outer one, as reentrant checkpointing has it. The nodes after it run in the
/// outer one, and queue the end there. False if there is none.
bool Reducer::Impl::queue_end_after(const torch::autograd::Node& node) {
  for (const torch::autograd::Edge& edge : node.next_edges()) {
    if (!edge.is_valid()) continue;
    waits_for_outer_ = true;
    if (hooks_->leaf_of(edge.function.get())) continue;  // on_gradient() will queue it.
    auto hook = std::make_unique<NodeHook>([weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->continue_backward();
    });
    outer_hooks_.emplace_back(edge.function, hook.get());
    auto& hooks = edge.function->tensor_pre_hooks();
    hooks.insert(hooks.begin(), std::move(hook));  // Before any hook that may throw.
  }
  return waits_for_outer_;
}

void Reducer::Impl::continue_backward() {
  const std::lock_guard lock(mutex_);
  if (in_backward_ && !backward_has_died() && torch::autograd::get_current_graph_task_id() != end_task_) queue_end();
}

void Reducer::Impl::end_backward() {
  const std::lock_guard lock(mutex_);
  if (!in_backward_) return;
  try {
    // This thread has a current node only if a node of another backward runs this backward. (As long as the engine
    // nests no deeper than it has threads for.)
    const NodePtr outer = torch::autograd::get_current_node();
    if (outer && torch::autograd::get_current_graph_task_id() != output_task_ && queue_end_after(*outer)) return;
    finish_backward();
  } catch (...) {
    give_up("at its end");
    rethrow_with_advice();
  }
}

/// `action` runs whenever a backward comes by one of them.
void Reducer::Impl::at_outputs(const std::vector<at::Tensor>& outputs, void (Impl::*action)()) {
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    // A leaf may live on, and keeps its hooks.
    if (output.is_leaf() && action != &Impl::enter_at_output) continue;
    output.register_hook([weak = weak_from_this(), action](const at::Tensor&) {
      if (const auto self = weak.lock()) (self.get()->*action)();
    });
  }
}

/// Backward ends with the graph task that has reached an output, even if that task runs within another backward: a
/// checkpoint holds the whole model, or a hook of another model calls backward().
void Reducer::Impl::note_task() {
  const std::lock_guard lock(mutex_);
  output_task_ = torch::autograd::get_current_graph_task_id();
}

/// At an output of a forward that uses no parameter, as far as its graph shows: the other ranks wait for this one.
void Reducer::Impl::enter_at_output() {
  const std::lock_guard lock(mutex_);
  if (!synchronize || !hooks_->may_run()) return;
  enter_backward();
  output_task_ = torch::autograd::get_current_graph_task_id();
}

/// In a catch block: tells the other ranks, which would wait for this one in a later bucket or collective. Where the
/// error came from them, the group has ended already, and nothing changes.
void Reducer::Impl::give_up(const std::string& where) noexcept {
  forget_backward();
  try {
    try {
      throw;
    } catch (const std::exception& error) {
      group_.abort(fmt::format("backward on rank {} failed {}: {}", group_.rank(), where, error.what()));
    }
  } catch (...) {
    group_.abort("backward failed");
  }
}

void Reducer::Impl::leave_backward() noexcept {
  in_backward_ = in_hook_ = waits_for_outer_ = false;
  used_.reset();
  end_task_ = output_task_ = -1;
  alive_.reset();
  for (const auto& [node, hook] : outer_hooks_)
    std::erase_if(node->tensor_pre_hooks(), [hook = hook](const auto& one) { return one.get() == hook; });
  outer_hooks_.clear();
}

void Reducer::Impl::forget_backward() noexcept {
  leave_backward();
  reached_output_ = {};
  memory_->forget();
  arrivals_.clear();  // Half an order, which the next backward begins anew.
  for (Bucket& bucket : buckets_) {
    bucket.work = {};
    bucket.finish = nullptr;
  }
}

}  // namespace ddpkit
