// Tier 2: torch/nn/module.h.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>
#include <memory>

namespace asr {

/// The linear system whose state is what the last `theta` steps looked like, as the coefficients of their first `order`
/// Legendre polynomials: m[t] = a m[t-1] + b u[t]. Voelker, Kajic and Eliasmith 2019, equations 2 and 3, made discrete
/// by a zero-order hold of one step.
struct LegendreSystem {
  at::Tensor a;  ///< [order, order] float64.
  at::Tensor b;  ///< [order] float64.
};
LegendreSystem legendre_system(std::int64_t order, double theta);

/// A memory of that kind for each of several channels. Not learned: it has no parameters.
///
/// forward() computes all steps at once, which Chilkuri and Eliasmith 2021 (arXiv 2102.11417, equations 22 to 26) do as
/// a convolution with the system's impulse response. Theirs is by FFT. This one cuts time into chunks: within a chunk
/// the convolution is a product with a Toeplitz matrix, between chunks the state is handed on by powers of `a`, both of
/// which are matrix products. On a CPU that is 2 to 4 times as fast as the FFT, and linear in the steps as well.
class LegendreMemory {
 public:
  LegendreMemory(std::int64_t order, double theta);

  /// `u` [batch, steps, channels] float32; returns the memory after each step, [batch, steps, order * channels] with
  /// channels the faster. Differentiable with regard to `u`.
  at::Tensor forward(const at::Tensor& u);

  /// The recurrent form, for sound as it comes: the memory after one more step. `u` [batch, channels], `state` [batch,
  /// order, channels], zeros at first.
  at::Tensor step(const at::Tensor& u, const at::Tensor& state);

  std::int64_t order() const noexcept { return order_; }

 private:
  // At most kSteps steps from `state`, which may be undefined.
  at::Tensor forward_from(const at::Tensor& u, const at::Tensor& state);
  const at::Tensor& carry(std::int64_t chunks);
  void move_to(c10::Device device);

  std::int64_t order_;
  at::Tensor a_, b_;   ///< float32.
  at::Tensor within_;  ///< [chunk * order, chunk + order]: a chunk's memories from its inputs and the state before it.
  at::Tensor end_;     ///< [order, chunk]: the last of them from the inputs alone.
  at::Tensor powers_;  ///< [chunks + 1, order, order]: of `a` to the power of the chunk's steps.
  at::Tensor carry_;   ///< Of the number of chunks that was asked for last.
};

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
  at::Tensor output(const at::Tensor& x, const at::Tensor& memory);

  LmuOptions options_;
  LegendreMemory memory_;
  torch::nn::Linear to_memory_{nullptr}, from_memory_{nullptr}, direct_{nullptr};
};
TORCH_MODULE(LmuLayer);

}  // namespace asr
