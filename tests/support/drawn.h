// Random tensors, and their reduction by LibTorch.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <iterator>
#include <limits>
#include <random>
#include <span>
#include <type_traits>
#include <vector>

#include <ddpkit/comm/process_group.h>

namespace ddpkit::testing {

template <class T>
void draw_values(at::Tensor& tensor, std::mt19937_64& random) {
  using Limits = std::numeric_limits<T>;
  for (T& value : std::span(tensor.data_ptr<T>(), static_cast<std::size_t>(tensor.numel()))) {
    const std::uint64_t bits = random();
    const auto kind = random() % 16;
    if constexpr (std::is_same_v<T, bool>) {
      value = bits % 2 == 0;
    } else if constexpr (std::is_integral_v<T>) {
      constexpr T kSpecial[] = {Limits::min(), Limits::max(), 0, 1, static_cast<T>(-1)};
      value = kind < 4 ? kSpecial[bits % std::size(kSpecial)] : static_cast<T>(bits);
    } else {
      const T special[] = {T(0.0F),
                           T(-0.0F),
                           Limits::max(),
                           Limits::lowest(),
                           Limits::min(),
                           Limits::infinity(),
                           -Limits::infinity(),
                           Limits::quiet_NaN(),
                           T(60000.0F),
                           Limits::denorm_min()};
      // Mostly numbers of similar size, whose sum depends on the order. A few percent are special values.
      const double uniform = (static_cast<double>(bits >> 12) * 0x1p-51 - 1) * (kind < 4 ? 30000 : 3);
      value = kind == 0 && bits % 8 == 0 ? special[(bits >> 8) % std::size(special)] : static_cast<T>(uniform);
    }
  }
}

/// Draws `numel` values of the type: negative, of different sizes, and sometimes the limits of the type, zeroes of both
/// signs, infinities, NaN, 60,000.
inline at::Tensor drawn(at::ScalarType dtype, std::int64_t numel, std::mt19937_64& random) {
  at::Tensor tensor = at::empty({numel}, dtype);
  AT_DISPATCH_ALL_TYPES_AND3(at::kHalf, at::kBFloat16, at::kBool, dtype, "drawn",
                             [&] { draw_values<scalar_t>(tensor, random); });
  return tensor;
}

/// Reduces with LibTorch: in the order of the inputs, half types in float32 and rounded once.
inline at::Tensor reduced(const std::vector<at::Tensor>& inputs, ReduceOp op) {
  const at::ScalarType dtype = inputs[0].scalar_type();
  const bool is_half = dtype == at::kHalf || dtype == at::kBFloat16;
  const bool is_mean_of_integers = op == ReduceOp::kAvg && !at::isFloatingType(dtype);
  const auto wide = [&](const at::Tensor& t) {
    return is_half ? t.to(at::kFloat) : is_mean_of_integers ? t.to(at::kLong) : t;
  };
  at::Tensor result = wide(inputs[0]).clone();
  for (std::size_t r = 1; r < inputs.size(); ++r) {
    const at::Tensor next = wide(inputs[r]);
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        result = dtype == at::kBool ? result.logical_or(next) : result + next;
        break;
      case ReduceOp::kProduct:
        result = dtype == at::kBool ? result.logical_and(next) : result * next;
        break;
      case ReduceOp::kMin:
        result = at::minimum(result, next);
        break;
      case ReduceOp::kMax:
        result = at::maximum(result, next);
        break;
      case ReduceOp::kBand:
        result = result.bitwise_and(next);
        break;
      case ReduceOp::kBor:
        result = result.bitwise_or(next);
        break;
      case ReduceOp::kBxor:
        result = result.bitwise_xor(next);
        break;
    }
  }
  const auto count = static_cast<std::int64_t>(inputs.size());
  if (op == ReduceOp::kAvg)
    result = at::isFloatingType(dtype) ? result / static_cast<double>(count) : at::div(result, count, "trunc");
  return result.to(dtype);
}

/// Returns whether the numbers are equal or both NaN.
inline bool same(const at::Tensor& a, const at::Tensor& b) {
  if (!at::isFloatingType(a.scalar_type())) return a.equal(b);
  return (a.eq(b) | (a.isnan() & b.isnan())).all().item<bool>();
}

}  // namespace ddpkit::testing
