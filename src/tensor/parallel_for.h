// Tier 0: c10/util only.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace ddpkit::simd {

/// Calls `body(begin, end)` on parts of [0, count) on LibTorch's own threads, and returns when all is done; on this
/// thread alone where count < grain or at::get_num_threads() is 1. at::parallel_for would do the same, but is a
/// template that runs on one thread unless OpenMP is on where it is compiled.
void parallel_for(std::int64_t count, std::int64_t grain, c10::function_ref<void(std::int64_t, std::int64_t)> body);

}  // namespace ddpkit::simd
