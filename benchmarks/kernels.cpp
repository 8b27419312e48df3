// Google Benchmark of the sum kernels of all-reduce. bytes_per_second counts the bytes read and written.
#include <benchmark/benchmark.h>

#include <vector>

#include "kernels/reduce.h"

namespace {

using ddpkit::kernels::DataType;

/// Sums `inputs` buffers and writes the sum to each of them, as an in-place all-reduce does with its slice.
void reduce_in_place(benchmark::State& state, DataType dtype, std::size_t element_bytes, std::size_t inputs) {
  const auto bytes = static_cast<std::size_t>(state.range(0));
  std::vector<std::vector<char>> buffers(inputs, std::vector<char>(bytes));
  std::vector<const void*> from;
  std::vector<void*> to;
  for (auto& buffer : buffers) {
    from.push_back(buffer.data());
    to.push_back(buffer.data());
  }
  for (auto _ : state) {
    ddpkit::kernels::reduce({.dtype = dtype,
                             .op = ddpkit::kernels::Reduction::kSum,
                             .numel = bytes / element_bytes,
                             .inputs = from.data(),
                             .input_count = inputs,
                             .outputs = to.data(),
                             .output_count = inputs});
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(2 * inputs * bytes));
  state.SetLabel(ddpkit::kernels::variant_name());
}

void sizes(benchmark::internal::Benchmark* benchmark) { benchmark->RangeMultiplier(16)->Range(4 << 10, 64 << 20); }

BENCHMARK_CAPTURE(reduce_in_place, float32_of_2, DataType::kFloat32, 4, 2)->Apply(sizes);
BENCHMARK_CAPTURE(reduce_in_place, float32_of_4, DataType::kFloat32, 4, 4)->Apply(sizes);
BENCHMARK_CAPTURE(reduce_in_place, bfloat16_of_2, DataType::kBFloat16, 2, 2)->Apply(sizes);
BENCHMARK_CAPTURE(reduce_in_place, bfloat16_of_4, DataType::kBFloat16, 2, 4)->Apply(sizes);
BENCHMARK_CAPTURE(reduce_in_place, float64_of_2, DataType::kFloat64, 8, 2)->Apply(sizes);
BENCHMARK_CAPTURE(reduce_in_place, float64_of_4, DataType::kFloat64, 8, 4)->Apply(sizes);

}  // namespace

BENCHMARK_MAIN();
