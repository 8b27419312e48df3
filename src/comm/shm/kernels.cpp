#include "kernels.h"

#include <stdexcept>

#include "simd/variant.h"

namespace ddpkit::shm {

#define DDPKIT_DECLARE_VARIANT(name)                                                             \
  bool reduce_##name(DataType dtype, Reduction op, std::size_t numel, const void* const* inputs, \
                     std::size_t input_count, void* const* outputs, std::size_t output_count)
DDPKIT_DECLARE_VARIANT(baseline);
#if defined(__x86_64__)
DDPKIT_DECLARE_VARIANT(avx2);
DDPKIT_DECLARE_VARIANT(avx512);
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

void reduce(DataType dtype, Reduction op, std::size_t numel, const void* const* inputs, std::size_t input_count,
            void* const* outputs, std::size_t output_count) {
  static const auto function = DDPKIT_CHOOSE_VARIANT(reduce);
  if (!function(dtype, op, numel, inputs, input_count, outputs, output_count))
    throw std::logic_error("a reduction that supports() refuses");
}

const char* kernel_variant() { return simd::variant_name(); }

}  // namespace ddpkit::shm
