#include "tensor/parallel_for.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>

namespace ddpkit::simd {

void parallel_for(std::int64_t count, std::int64_t grain, c10::function_ref<void(std::int64_t, std::int64_t)> body) {
  if (count <= 0) return;
  if (count < grain || at::get_num_threads() == 1) return body(0, count);
  // TensorIterator partitions its elements among LibTorch's threads. The elements are never accessed: only their
  // addresses are used, as indices.
  const at::Tensor numbers = at::empty({count}, at::kByte);
  const char* const first = static_cast<const char*>(numbers.const_data_ptr());
  auto iterator = at::TensorIteratorConfig().add_const_input(numbers).build();
  iterator.for_each(
      [&](char** data, const std::int64_t* strides, std::int64_t length, std::int64_t rows) {
        for (std::int64_t row = 0; row < rows; ++row) {
          const std::int64_t begin = data[0] + row * strides[1] - first;
          body(begin, begin + length);
        }
      },
      grain);
}

}  // namespace ddpkit::simd
