#include "parallel/autograd/gradient_hooks.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace ddpkit {

class GradientHooks::Hook : public torch::autograd::FunctionPostHook {
 public:
  Hook(std::shared_ptr<Shared> shared, std::size_t leaf) : shared(std::move(shared)), leaf_(leaf) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    if (!shared->replaced) shared->call(leaf_, inputs.empty() ? at::Tensor() : inputs[0]);
    return outputs;
  }

  const std::shared_ptr<Shared> shared;

 private:
  std::size_t leaf_;
};

GradientHooks::GradientHooks(std::vector<at::Tensor> leaves, Call call, Kind kind)
    : shared_(std::make_shared<Shared>()), streams_(leaves.empty() ? c10::Device(at::kCPU) : leaves[0].device()) {
  shared_->call = std::move(call);
  shared_->kind = kind;
  stream_ = streams_.current();
  for (at::Tensor& leaf : leaves) {
    installed_.push_back({.leaf = std::move(leaf)});
    install(installed_.size() - 1);
  }
}

void GradientHooks::install(std::size_t leaf) {
  Installed& entry = installed_[leaf];
  if (entry.accumulator) entry.accumulator->del_post_hook(entry.key);
  leaf_of_.erase(entry.accumulator.get());
  entry.accumulator.reset();  // If this was the last owner, autograd creates one for the current stream.
  entry.accumulator = torch::autograd::impl::grad_accumulator(entry.leaf);
  if (!entry.accumulator) return;
  leaf_of_[entry.accumulator.get()] = leaf;
  for (const auto& hook : std::as_const(*entry.accumulator).post_hooks()) {
    const auto* older = dynamic_cast<const Hook*>(hook.get());
    if (older && shared_->kind == Kind::kExclusive && older->shared->kind == Kind::kExclusive)
      older->shared->replaced = true;
  }
  entry.key = entry.accumulator->add_post_hook(std::make_unique<Hook>(shared_, leaf));
}

void GradientHooks::refresh() {
  const std::optional<c10::Stream> stream = streams_.current();
  const bool moved = stream != stream_;
  stream_ = stream;
  for (std::size_t i = 0; i < installed_.size(); ++i) {
    const Installed& entry = installed_[i];
    const bool is_hooked = entry.accumulator || !entry.leaf.requires_grad();
    if (moved || !is_hooked || torch::autograd::impl::try_get_grad_accumulator(entry.leaf) != entry.accumulator)
      install(i);
  }
}

void GradientHooks::remove() noexcept {
  for (Installed& entry : installed_) {
    if (entry.accumulator) entry.accumulator->del_post_hook(entry.key);
  }
  installed_.clear();
  leaf_of_.clear();
}

std::optional<std::size_t> GradientHooks::leaf_of(const torch::autograd::Node* node) const {
  const auto found = leaf_of_.find(node);
  return found != leaf_of_.end() ? std::optional(found->second) : std::nullopt;
}

bool GradientHooks::may_run() const {
  const auto* nodes = torch::autograd::get_current_graph_task_exec_info();
  if (!nodes || nodes->empty()) return true;
  return std::any_of(installed_.begin(), installed_.end(), [&](const Installed& entry) {
    const auto found = nodes->find(entry.accumulator.get());
    return found != nodes->end() && found->second.needed_;
  });
}

bool GradientHooks::is_sharded(const at::Tensor& leaf) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(leaf);
  if (!accumulator) return false;
  const auto& hooks = std::as_const(*accumulator).post_hooks();
  return std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) {
    const auto* own = dynamic_cast<const Hook*>(hook.get());
    return own && !own->shared->taker.expired() && !own->shared->replaced;
  });
}

}  // namespace ddpkit
