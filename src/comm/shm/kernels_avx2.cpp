#include "kernels_impl.h"

namespace ddpkit::shm {

bool reduce_avx2(DataType dtype, Reduction op, std::size_t numel, const void* const* inputs, std::size_t input_count,
                 void* const* outputs, std::size_t output_count) {
  return reduce_any(dtype, op, numel, inputs, input_count, outputs, output_count);
}

}  // namespace ddpkit::shm
