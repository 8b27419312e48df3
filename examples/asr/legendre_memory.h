// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

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

/// A memory of that kind for each of several channels, read by a linear layer. The memory itself is not learned.
///
/// project() computes all steps at once, which Chilkuri and Eliasmith 2021 (arXiv 2102.11417, equations 22 to 26) do as
/// a convolution with the system's impulse response. Theirs is by FFT. This one cuts time into chunks: within a chunk
/// the convolution is a product with a Toeplitz matrix, between chunks the state is handed on by powers of `a`, both of
/// which are matrix products. On a CPU that is 2 to 4 times as fast as the FFT, and linear in the steps as well.
/// Memories are many times as large as what they remember: they are made for some chunks at a time, read, and made
/// again in backward rather than kept.
class LegendreMemory {
 public:
  LegendreMemory(std::int64_t order, double theta);

  /// `u` [batch, steps, channels]; returns the memory after each step (order * channels numbers, channels the faster)
  /// times `weight` [outputs, order * channels] plus `bias` [outputs]: [batch, steps, outputs]. Under autocast the
  /// linear layer has its type; memories are float32. Differentiable once.
  at::Tensor project(const at::Tensor& u, const at::Tensor& weight, const at::Tensor& bias);

  /// The recurrent form, for sound as it comes: the memory after one more step. `u` [batch, channels], `state` [batch,
  /// order, channels], zeros at first.
  at::Tensor step(const at::Tensor& u, const at::Tensor& state);

  std::int64_t order() const noexcept { return order_; }

  struct Matrices;

 private:
  const std::shared_ptr<Matrices>& on(c10::Device device);

  std::int64_t order_;
  std::shared_ptr<Matrices> matrices_;
};

}  // namespace asr
