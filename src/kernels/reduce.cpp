#include "kernels/reduce.h"

#include <stdexcept>

#include "kernels/variant.h"

namespace ddpkit::shm {

bool reduce_baseline(const ReduceArguments& arguments);
#if defined(__x86_64__)
bool reduce_avx2(const ReduceArguments& arguments);
bool reduce_avx512(const ReduceArguments& arguments);
#endif

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
  static const auto function = DDPKIT_CHOOSE_VARIANT(reduce);
  if (!function(arguments)) throw std::logic_error("a reduction that supports() refuses");
}

const char* kernel_variant() { return simd::variant_name(); }

}  // namespace ddpkit::shm
