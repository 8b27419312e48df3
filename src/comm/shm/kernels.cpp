#include "kernels.h"

#include <stdexcept>

namespace ddpkit::shm {

#define DDPKIT_DECLARE_VARIANT(name)                                                             \
  bool reduce_##name(DataType dtype, Reduction op, std::size_t numel, const void* const* inputs, \
                     std::size_t input_count, void* const* outputs, std::size_t output_count)
DDPKIT_DECLARE_VARIANT(baseline);
#if defined(__x86_64__)
DDPKIT_DECLARE_VARIANT(avx2);
DDPKIT_DECLARE_VARIANT(avx512);
#endif

namespace {

using Variant = decltype(&reduce_baseline);

struct Choice {
  Variant function;
  const char* name;
};

Choice choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return {reduce_avx512, "avx512"};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return {reduce_avx2, "avx2"};
#endif
  return {reduce_baseline, "baseline"};
}

const Choice& chosen() {
  static const Choice choice = choose();
  return choice;
}

}  // namespace

bool supports(DataType dtype, Reduction op) {
  const bool bitwise = op == Reduction::kBand || op == Reduction::kBor || op == Reduction::kBxor;
  switch (dtype) {
    case DataType::kFloat16:
    case DataType::kBFloat16:
    case DataType::kFloat32:
    case DataType::kFloat64:
      return !bitwise;
    case DataType::kBool:
      return op != Reduction::kAvg;
    default:
      return true;
  }
}

void reduce(DataType dtype, Reduction op, std::size_t numel, const void* const* inputs, std::size_t input_count,
            void* const* outputs, std::size_t output_count) {
  if (!chosen().function(dtype, op, numel, inputs, input_count, outputs, output_count))
    throw std::logic_error("a reduction that supports() refuses");
}

const char* kernel_variant() { return chosen().name; }

}  // namespace ddpkit::shm
