// Tier 2: torch/csrc/autograd/function_hook.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <functional>
#include <utility>

namespace ddpkit {

/// Calls back after a leaf's accumulator has added a gradient, with that gradient: undefined where none came.
class GradientHook : public torch::autograd::FunctionPostHook {
 public:
  using Call = std::function<void(const at::Tensor& added)>;
  explicit GradientHook(Call call) : call_(std::move(call)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    call_(inputs.empty() ? at::Tensor() : inputs[0]);
    return outputs;
  }

 private:
  Call call_;
};

}  // namespace ddpkit
