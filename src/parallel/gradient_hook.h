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
  explicit GradientHook(Call call, std::function<void()> replaced = {})
      : call_(std::move(call)), replaced_(std::move(replaced)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    call_(inputs.empty() ? at::Tensor() : inputs[0]);
    return outputs;
  }
  void replace() {
    if (replaced_) replaced_();
  }

 private:
  Call call_;
  std::function<void()> replaced_;
};

}  // namespace ddpkit
