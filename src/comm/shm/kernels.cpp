#include "kernels.h"

#include <stdexcept>

namespace ddpkit::shm {

bool reduce_baseline(const ReduceArguments& arguments);
#if defined(__x86_64__)
bool reduce_avx2(const ReduceArguments& arguments);
bool reduce_avx512(const ReduceArguments& arguments);
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

void reduce(const ReduceArguments& arguments) {
  if (!chosen().function(arguments)) throw std::logic_error("a reduction that supports() refuses");
}

const char* kernel_variant() { return chosen().name; }

}  // namespace ddpkit::shm
