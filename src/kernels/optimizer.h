// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/variant.h"

namespace ddpkit::kernels {

/// Constants of one step, equal for all elements of a parameter.
struct AdamConstants {
  double beta1 = 0, beta2 = 0, eps = 0;
  double decay = 1;            ///< Factor of the parameters: AdamW's 1 - lr * weight_decay.
  double weight_decay = 0;     ///< Added to the gradient, multiplied by the parameter: Adam's weight decay.
  double step_size = 0;        ///< lr / (1 - beta1^step).
  double inverse_root = 0;     ///< 1 / sqrt(1 - beta2^step).
  double gradient_factor = 1;  ///< Factor of the gradients, applied first.
};

/// With `master` weights (Micikevicius and others, arXiv 1710.03740), the kernel updates the master and rounds it to
/// the parameter. If a parameter differs from its rounded master, other code has written to it: the master is set to
/// the parameter.
///
/// One step of Adam (Kingma and Ba, arXiv 1412.6980) or AdamW (Loshchilov and Hutter, arXiv 1711.05101) on `numel`
/// elements. Pointers need only the alignment of their element type.
struct AdamArguments {
  DataType dtype = DataType::kFloat32;
  std::size_t numel = 0;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  void* exp_avg = nullptr;
  void* exp_avg_sq = nullptr;
  void* max_exp_avg_sq = nullptr;  ///< Null without amsgrad.
  float* master = nullptr;         ///< The float32 master of a half-precision parameter. The state is float32 then.
  AdamConstants constants = {};
};

struct SgdConstants {
  double lr = 0, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false;
  bool first = false;  ///< First step: the momentum buffer is uninitialized and is set to the gradient.
  double gradient_factor = 1;
};

/// One step of stochastic gradient descent on `numel` elements.
struct SgdArguments {
  DataType dtype = DataType::kFloat32;
  std::size_t numel = 0;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  void* momentum_buffer = nullptr;  ///< Null if momentum is 0.
  float* master = nullptr;          ///< See AdamArguments::master.
  SgdConstants constants = {};
};

enum class NormKind : std::uint8_t { kSquares, kAbsolutes, kLargest };

/// Computes the sum of squares, the sum of absolute values, or the largest absolute value, in double. NaN if an element
/// is NaN.
struct NormArguments {
  DataType dtype = DataType::kFloat32;
  NormKind kind = NormKind::kSquares;
  std::size_t numel = 0;
  const void* values = nullptr;
  double result = 0;
};

/// values[i] *= factor.
struct ScaleArguments {
  DataType dtype = DataType::kFloat32;
  std::size_t numel = 0;
  void* values = nullptr;
  double factor = 1;
};

/// The kernels of this file are for floating-point types and throw std::logic_error for other types. Half types are
/// computed in float32. All variants give the same bits.
void adam(const AdamArguments& arguments);
void sgd(const SgdArguments& arguments);
void norm(NormArguments& arguments);
void scale(const ScaleArguments& arguments);

/// One variant; the processor must support its instructions. Returns false for other types.
template <Variant>
bool adam(const AdamArguments& arguments);
template <Variant>
bool sgd(const SgdArguments& arguments);
template <Variant>
bool norm(NormArguments& arguments);
template <Variant>
bool scale(const ScaleArguments& arguments);

}  // namespace ddpkit::kernels
