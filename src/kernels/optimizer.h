// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/variant.h"

namespace ddpkit::kernels {

/// What is the same for all elements of a parameter in one step.
struct AdamConstants {
  double beta1 = 0, beta2 = 0, eps = 0;
  double decay = 1;            ///< Parameters are multiplied by it: AdamW's 1 - lr * weight_decay.
  double weight_decay = 0;     ///< Times the parameter, is added to the gradient: Adam's.
  double step_size = 0;        ///< lr / (1 - beta1^step).
  double inverse_root = 0;     ///< 1 / sqrt(1 - beta2^step).
  double gradient_factor = 1;  ///< Gradients are multiplied by it first.
};

/// With `master` weights (Micikevicius and others, arXiv 1710.03740) the master is updated and the parameter becomes
/// what it rounds to. A parameter that is not what its master rounds to has been written to: the master takes it over.
///
/// One step of Adam (Kingma and Ba, arXiv 1412.6980) or AdamW (Loshchilov and Hutter, arXiv 1711.05101) on `numel`
/// elements. Pointers need no alignment beyond their element's.
struct AdamArguments {
  DataType dtype = DataType::kFloat32;
  std::size_t numel = 0;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  void* exp_avg = nullptr;
  void* exp_avg_sq = nullptr;
  void* max_exp_avg_sq = nullptr;  ///< Null without amsgrad.
  float* master = nullptr;         ///< What a half type's parameter is rounded from; the state is float32 then.
  AdamConstants constants = {};
};

struct SgdConstants {
  double lr = 0, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false;
  bool first = false;  ///< The momentum buffer holds nothing yet: it becomes the gradient.
  double gradient_factor = 1;
};

/// One step of stochastic gradient descent on `numel` elements.
struct SgdArguments {
  DataType dtype = DataType::kFloat32;
  std::size_t numel = 0;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  void* momentum_buffer = nullptr;  ///< Null where momentum is 0.
  float* master = nullptr;          ///< As AdamArguments::master.
  SgdConstants constants = {};
};

enum class NormKind : std::uint8_t { kSquares, kAbsolutes, kLargest };

/// The sum of squares, the sum of absolutes, or the largest absolute of some elements, in double; NaN where one is.
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

/// The kernels of this file are for floating-point types. Half types are computed in float32. All variants give equal
/// bits. Throw std::logic_error for other types.
void adam(const AdamArguments& arguments);
void sgd(const SgdArguments& arguments);
void norm(NormArguments& arguments);
void scale(const ScaleArguments& arguments);

/// One variant; the processor must have its instructions. False for other types.
template <Variant>
bool adam(const AdamArguments& arguments);
template <Variant>
bool sgd(const SgdArguments& arguments);
template <Variant>
bool norm(NormArguments& arguments);
template <Variant>
bool scale(const ScaleArguments& arguments);

}  // namespace ddpkit::kernels
