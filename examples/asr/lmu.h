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
  std::int64_t width = 512;           ///< Number of inputs and of outputs.
  std::int64_t memory_channels = 40;  ///< Number of signals in the memory.
  std::int64_t order = 32;            ///< Numbers per signal.
  double theta = 64;                  ///< Length of the memory, in steps.
};

/// One layer: u = x Wu + bu; m = memory(u); y = gelu(m Wm + x Wx + b). The parallelisable LMU of Chilkuri and Eliasmith
/// 2021 (section 3.2). There is no path from y or m back to u, so only the linear memory is recurrent.
class LmuLayerImpl : public torch::nn::Cloneable<LmuLayerImpl> {
 public:
  explicit LmuLayerImpl(const LmuOptions& options);
  void reset() override;

  /// `x` [batch, steps, width]; returns the same shape.
  at::Tensor forward(const at::Tensor& x);
  /// `x` [batch, width]; advances `state` [batch, order, memory_channels]. An undefined `state` is initialized.
  at::Tensor step(const at::Tensor& x, at::Tensor& state);

 private:
  LmuOptions options_;
  LegendreMemory memory_;
  torch::nn::Linear to_memory_{nullptr}, from_memory_{nullptr}, direct_{nullptr};
};
TORCH_MODULE(LmuLayer);

}  // namespace asr
