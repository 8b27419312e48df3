// Compiled once per variant and vectorized by the compiler. Everything except the kernel is in an unnamed namespace,
// and no code calls inline functions of other headers (see kernels/element.h).
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/element.h"
#include "kernels/reduce.h"

namespace ddpkit::kernels {
namespace {

struct Sum {
  template <class A>
  static A apply(A a, A b) {
    return static_cast<A>(a + b);
  }
};
struct Product {
  template <class A>
  static A apply(A a, A b) {
    return static_cast<A>(a * b);
  }
};
// As in c10d's other backends, a NaN of any rank must be in the result.
struct Min {
  template <class A>
  static A apply(A a, A b) {
    return (b < a || b != b) ? b : a;
  }
};
struct Max {
  template <class A>
  static A apply(A a, A b) {
    return (b > a || b != b) ? b : a;
  }
};
struct Band {
  template <class A>
  static A apply(A a, A b) {
    return static_cast<A>(a & b);
  }
};
struct Bor {
  template <class A>
  static A apply(A a, A b) {
    return static_cast<A>(a | b);
  }
};
struct Bxor {
  template <class A>
  static A apply(A a, A b) {
    return static_cast<A>(a ^ b);
  }
};

/// Elements per pass: the accumulators fit into the L1 cache.
constexpr std::size_t kBlock = 1024;
/// Bytes per pass if there is a buffer to copy. Small enough that the processor prefetches the next lines to write
/// while it waits for the lines to read.
constexpr std::size_t kCopyBlockBytes = 512;
constexpr std::size_t kLineBytes = 64;

/// Copies elements [begin, begin + n) of a.copy_from and prefetches the next lines.
template <class S>
void copy_along(const ReduceArguments& a, std::size_t begin, std::size_t n) {
  S* const to = static_cast<S*>(a.copy_to) + begin;
  const S* const from = static_cast<const S*>(a.copy_from) + begin;
  const std::size_t ahead = a.numel - begin - n < n ? a.numel - begin - n : n;
  for (std::size_t i = 0; i < ahead; i += kLineBytes / sizeof(S)) __builtin_prefetch(to + n + i, 1, 3);
  for (std::size_t i = 0; i < n; ++i) to[i] = from[i];
}

template <class T, class Op, bool kAverage>
void reduce_typed(const ReduceArguments& a) {
  using S = typename Element<T>::Storage;
  using Accumulator = typename Element<T>::Accumulator;
  // For the mean of integers, the sum and the number of inputs may exceed the integer type.
  using A = std::conditional_t<kAverage && std::is_integral_v<T>, std::int64_t, Accumulator>;
  const auto load = [](S element) { return static_cast<A>(Element<T>::load(element)); };
  const auto store = [](A value) { return Element<T>::store(static_cast<Accumulator>(value)); };
  const A count = static_cast<A>(a.input_count);
  A accumulator[kBlock];
  const std::size_t block = a.copy_to ? kCopyBlockBytes / sizeof(S) : kBlock;
  for (std::size_t begin = 0; begin < a.numel; begin += block) {
    const std::size_t n = a.numel - begin < block ? a.numel - begin : block;
    if (a.copy_to) copy_along<S>(a, begin, n);
    const S* first = static_cast<const S*>(a.inputs[0]) + begin;
    if (a.input_count == 2 && a.output_count <= 2) {
      // The common case, two ranks: one pass without accumulators.
      const S* second = static_cast<const S*>(a.inputs[1]) + begin;
      S* out0 = static_cast<S*>(a.outputs[0]) + begin;
      S* out1 = static_cast<S*>(a.outputs[a.output_count - 1]) + begin;
      if (a.output_count == 1) {
#pragma GCC ivdep
        for (std::size_t i = 0; i < n; ++i) {
          A value = Op::apply(load(first[i]), load(second[i]));
          if constexpr (kAverage) value = static_cast<A>(value / count);
          out0[i] = store(value);
        }
        continue;
      }
      // Element i of the outputs depends only on element i of the inputs, so overlap is harmless.
#pragma GCC ivdep
      for (std::size_t i = 0; i < n; ++i) {
        A value = Op::apply(load(first[i]), load(second[i]));
        if constexpr (kAverage) value = static_cast<A>(value / count);
        out0[i] = out1[i] = store(value);
      }
      continue;
    }
#pragma GCC ivdep
    for (std::size_t i = 0; i < n; ++i) accumulator[i] = load(first[i]);
    for (std::size_t r = 1; r < a.input_count; ++r) {
      const S* next = static_cast<const S*>(a.inputs[r]) + begin;
#pragma GCC ivdep
      for (std::size_t i = 0; i < n; ++i) accumulator[i] = Op::apply(accumulator[i], load(next[i]));
    }
    if constexpr (kAverage) {
      for (std::size_t i = 0; i < n; ++i) accumulator[i] = static_cast<A>(accumulator[i] / count);
    }
    for (std::size_t k = 0; k < a.output_count; ++k) {
      S* out = static_cast<S*>(a.outputs[k]) + begin;
#pragma GCC ivdep
      for (std::size_t i = 0; i < n; ++i) out[i] = store(accumulator[i]);
    }
  }
}

template <class T>
bool reduce_number(Reduction op, const ReduceArguments& a) {
  switch (op) {
    case Reduction::kSum:
      return reduce_typed<T, Sum, false>(a), true;
    case Reduction::kAvg:
      return reduce_typed<T, Sum, true>(a), true;
    case Reduction::kProduct:
      return reduce_typed<T, Product, false>(a), true;
    case Reduction::kMin:
      return reduce_typed<T, Min, false>(a), true;
    case Reduction::kMax:
      return reduce_typed<T, Max, false>(a), true;
    default:
      return false;
  }
}

template <class T>
bool reduce_integer(Reduction op, const ReduceArguments& a) {
  switch (op) {
    case Reduction::kBand:
      return reduce_typed<T, Band, false>(a), true;
    case Reduction::kBor:
      return reduce_typed<T, Bor, false>(a), true;
    case Reduction::kBxor:
      return reduce_typed<T, Bxor, false>(a), true;
    default:
      return reduce_number<T>(op, a);
  }
}

/// As in c10d, the sum of bools is a logical or, and the product is a logical and. Bytes are 0 or 1.
Reduction for_bool(Reduction op) {
  switch (op) {
    case Reduction::kSum:
    case Reduction::kMax:
      return Reduction::kBor;
    case Reduction::kProduct:
    case Reduction::kMin:
      return Reduction::kBand;
    default:
      return op;
  }
}

}  // namespace

template <>
bool reduce<Variant::DDPKIT_VARIANT>(const ReduceArguments& a) {
  const Reduction op = a.op;
  switch (a.dtype) {
    case DataType::kUInt8:
      return reduce_integer<std::uint8_t>(op, a);
    case DataType::kInt8:
      return reduce_integer<std::int8_t>(op, a);
    case DataType::kInt16:
      return reduce_integer<std::int16_t>(op, a);
    case DataType::kInt32:
      return reduce_integer<std::int32_t>(op, a);
    case DataType::kInt64:
      return reduce_integer<std::int64_t>(op, a);
    case DataType::kFloat16:
      return reduce_number<Half>(op, a);
    case DataType::kBFloat16:
      return reduce_number<BFloat16>(op, a);
    case DataType::kFloat32:
      return reduce_number<float>(op, a);
    case DataType::kFloat64:
      return reduce_number<double>(op, a);
    case DataType::kBool:
      return reduce_integer<std::uint8_t>(for_bool(op), a);
  }
  return false;
}

}  // namespace ddpkit::kernels
