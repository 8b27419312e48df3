// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace asr {

/// A linear system whose state approximates the last `theta` inputs by the coefficients of their first `order` Legendre
/// polynomials: m[t] = a m[t-1] + b u[t]. Voelker, Kajic and Eliasmith 2019, equations 2 and 3, discretised by a
/// zero-order hold of one step.
struct LegendreSystem {
  at::Tensor a;  ///< [order, order] float64.
  at::Tensor b;  ///< [order] float64.
};
LegendreSystem legendre_system(std::int64_t order, double theta);

/// One Legendre memory per channel, read by a linear layer. The memory itself has no parameters.
///
/// project() computes all steps at once. Chilkuri and Eliasmith 2021 (arXiv 2102.11417, equations 22 to 26) do this as
/// a convolution with the system's impulse response, by FFT. This implementation divides time into chunks. Within a
/// chunk, the convolution is a product with a Toeplitz matrix. Between chunks, powers of `a` pass the state. Both are
/// matrix products. On a CPU they are 2 to 4 times as fast as the FFT, and also linear in the steps.
/// Memories are many times as large as their inputs. They are computed for some chunks at a time, read, and recomputed
/// in backward instead of stored.
class LegendreMemory {
 public:
  LegendreMemory(std::int64_t order, double theta);

  /// `u` [batch, steps, channels]. Returns the memory after each step (order * channels numbers, channels vary fastest)
  /// times `weight` [outputs, order * channels] plus `bias` [outputs]: [batch, steps, outputs]. Under autocast the
  /// linear layer has its type; memories are float32. Differentiable once.
  at::Tensor project(const at::Tensor& u, const at::Tensor& weight, const at::Tensor& bias);

  /// The recurrent form, for streamed sound. Returns the memory after one more step. `u` [batch, channels], `state`
  /// [batch, order, channels]; the initial state is zeros.
  at::Tensor step(const at::Tensor& u, const at::Tensor& state);

  std::int64_t order() const noexcept { return order_; }

  struct Matrices;

 private:
  const std::shared_ptr<Matrices>& on(c10::Device device);

  std::int64_t order_;
  std::shared_ptr<Matrices> matrices_;
};

}  // namespace asr
