// Tier 2: torch/csrc/autograd/function_hook.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <functional>
#include <utility>

namespace ddpkit {

/// Calls back after a leaf's accumulator has added a gradient, with that gradient: undefined where none came.
/// `replaced` is for whoever installs another hook that must be the only one.
class GradientHook : public torch::autograd::FunctionPostHook {
 public:
  using Call = std::function<void(const at::Tensor& added)>;
  explicit GradientHook(Call call, std::function<void()> replaced = {}, std::function<bool()> has_sink = {})
      : call_(std::move(call)), replaced_(std::move(replaced)), has_sink_(std::move(has_sink)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    call_(inputs.empty() ? at::Tensor() : inputs[0]);
    return outputs;
  }
  void replace() {
    if (replaced_) replaced_();
  }
  /// Whether the gradient goes to a GradientSink instead of the leaf.
  bool has_sink() const { return has_sink_ && has_sink_(); }

 private:
  Call call_;
  std::function<void()> replaced_;
  std::function<bool()> has_sink_;
};

}  // namespace ddpkit
