// Included once by each kernels_<variant>.cpp, which its own compiler flags vectorise. Everything lies in an unnamed
// namespace and calls no inline function of other headers: a function that the linker shares between translation units
// could carry one variant's instructions to a processor that lacks them.
#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "simd/element.h"

namespace ddpkit::shm {
namespace {

using simd::BFloat16;
using simd::Element;

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
// As in c10d's other backends a NaN on any rank must reach the result.
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

/// Elements of one pass: the accumulators stay in the L1 cache.
constexpr std::size_t kBlock = 1024;

template <class T, class Op, bool kAverage>
void reduce_typed(std::size_t numel, const void* const* inputs, std::size_t input_count, void* const* outputs,
                  std::size_t output_count) {
  using A = typename Element<T>::Accumulator;
  using S = typename Element<T>::Storage;
  const A count = static_cast<A>(input_count);
  A accumulator[kBlock];
  for (std::size_t begin = 0; begin < numel; begin += kBlock) {
    const std::size_t n = numel - begin < kBlock ? numel - begin : kBlock;
    const S* first = static_cast<const S*>(inputs[0]) + begin;
    if (input_count == 2 && output_count <= 2) {
      // The common case, two ranks: one pass, nothing kept.
      const S* second = static_cast<const S*>(inputs[1]) + begin;
      S* out0 = static_cast<S*>(outputs[0]) + begin;
      S* out1 = static_cast<S*>(outputs[output_count - 1]) + begin;
      if (output_count == 1) {
#pragma GCC ivdep
        for (std::size_t i = 0; i < n; ++i) {
          A value = Op::apply(Element<T>::load(first[i]), Element<T>::load(second[i]));
          if constexpr (kAverage) value = static_cast<A>(value / count);
          out0[i] = Element<T>::store(value);
        }
        continue;
      }
      // Element i of the outputs depends on element i of the inputs alone, so that overlap is harmless.
#pragma GCC ivdep
      for (std::size_t i = 0; i < n; ++i) {
        A value = Op::apply(Element<T>::load(first[i]), Element<T>::load(second[i]));
        if constexpr (kAverage) value = static_cast<A>(value / count);
        out0[i] = out1[i] = Element<T>::store(value);
      }
      continue;
    }
#pragma GCC ivdep
    for (std::size_t i = 0; i < n; ++i) accumulator[i] = Element<T>::load(first[i]);
    for (std::size_t r = 1; r < input_count; ++r) {
      const S* next = static_cast<const S*>(inputs[r]) + begin;
#pragma GCC ivdep
      for (std::size_t i = 0; i < n; ++i) accumulator[i] = Op::apply(accumulator[i], Element<T>::load(next[i]));
    }
    if constexpr (kAverage) {
      for (std::size_t i = 0; i < n; ++i) accumulator[i] = static_cast<A>(accumulator[i] / count);
    }
    for (std::size_t k = 0; k < output_count; ++k) {
      S* out = static_cast<S*>(outputs[k]) + begin;
#pragma GCC ivdep
      for (std::size_t i = 0; i < n; ++i) out[i] = Element<T>::store(accumulator[i]);
    }
  }
}

template <class T>
bool reduce_number(Reduction op, std::size_t numel, const void* const* inputs, std::size_t input_count,
                   void* const* outputs, std::size_t output_count) {
  switch (op) {
    case Reduction::kSum:
      return reduce_typed<T, Sum, false>(numel, inputs, input_count, outputs, output_count), true;
    case Reduction::kAvg:
      return reduce_typed<T, Sum, true>(numel, inputs, input_count, outputs, output_count), true;
    case Reduction::kProduct:
      return reduce_typed<T, Product, false>(numel, inputs, input_count, outputs, output_count), true;
    case Reduction::kMin:
      return reduce_typed<T, Min, false>(numel, inputs, input_count, outputs, output_count), true;
    case Reduction::kMax:
      return reduce_typed<T, Max, false>(numel, inputs, input_count, outputs, output_count), true;
    default:
      return false;
  }
}

template <class T>
bool reduce_integer(Reduction op, std::size_t numel, const void* const* inputs, std::size_t input_count,
                    void* const* outputs, std::size_t output_count) {
  switch (op) {
    case Reduction::kBand:
      return reduce_typed<T, Band, false>(numel, inputs, input_count, outputs, output_count), true;
    case Reduction::kBor:
      return reduce_typed<T, Bor, false>(numel, inputs, input_count, outputs, output_count), true;
    case Reduction::kBxor:
      return reduce_typed<T, Bxor, false>(numel, inputs, input_count, outputs, output_count), true;
    default:
      return reduce_number<T>(op, numel, inputs, input_count, outputs, output_count);
  }
}

/// A sum of truth values is true where any is, a product where all are, as in c10d. Bytes hold 0 or 1.
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

bool reduce_any(DataType dtype, Reduction op, std::size_t numel, const void* const* inputs, std::size_t input_count,
                void* const* outputs, std::size_t output_count) {
  switch (dtype) {
    case DataType::kUInt8:
      return reduce_integer<std::uint8_t>(op, numel, inputs, input_count, outputs, output_count);
    case DataType::kInt8:
      return reduce_integer<std::int8_t>(op, numel, inputs, input_count, outputs, output_count);
    case DataType::kInt16:
      return reduce_integer<std::int16_t>(op, numel, inputs, input_count, outputs, output_count);
    case DataType::kInt32:
      return reduce_integer<std::int32_t>(op, numel, inputs, input_count, outputs, output_count);
    case DataType::kInt64:
      return reduce_integer<std::int64_t>(op, numel, inputs, input_count, outputs, output_count);
    case DataType::kFloat16:
      return reduce_number<_Float16>(op, numel, inputs, input_count, outputs, output_count);
    case DataType::kBFloat16:
      return reduce_number<BFloat16>(op, numel, inputs, input_count, outputs, output_count);
    case DataType::kFloat32:
      return reduce_number<float>(op, numel, inputs, input_count, outputs, output_count);
    case DataType::kFloat64:
      return reduce_number<double>(op, numel, inputs, input_count, outputs, output_count);
    case DataType::kBool:
      return reduce_integer<std::uint8_t>(for_bool(op), numel, inputs, input_count, outputs, output_count);
  }
  return false;
}

}  // namespace
}  // namespace ddpkit::shm
