// Tier 2: torch/nn/module.h.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>
#include <memory>

#include "asr/legendre_memory.h"

namespace asr {

struct LmuOptions {
  std::int64_t width = 512;           ///< Inputs and outputs.
  std::int64_t memory_channels = 40;  ///< Signals that are remembered.
  std::int64_t order = 32;            ///< Numbers that remember each.
  double theta = 64;                  ///< Steps they reach back.
};

/// One layer: u = x Wu + bu; m = memory(u); y = gelu(m Wm + x Wx + b). The parallelisable LMU of Chilkuri and Eliasmith
/// 2021 (section 3.2): no path from y or m back to u, so that all that recurs is the linear memory.
class LmuLayerImpl : public torch::nn::Cloneable<LmuLayerImpl> {
 public:
  explicit LmuLayerImpl(const LmuOptions& options);
  void reset() override;

  /// `x` [batch, steps, width]; the same shape out.
  at::Tensor forward(const at::Tensor& x);
  /// `x` [batch, width]; moves `state` [batch, order, memory_channels] on, or begins where it is undefined.
  at::Tensor step(const at::Tensor& x, at::Tensor& state);

 private:
  LmuOptions options_;
  LegendreMemory memory_;
  torch::nn::Linear to_memory_{nullptr}, from_memory_{nullptr}, direct_{nullptr};
};
TORCH_MODULE(LmuLayer);

}  // namespace asr
