// Tier 0: c10/util only.
#pragma once

#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace ddpkit::simd {

/// Calls `body(begin, end)` on parts of [0, count) on LibTorch's threads and returns after all calls. Runs on the
/// calling thread alone if count < grain or at::get_num_threads() is 1. Replaces at::parallel_for, a template that runs
/// on one thread if the including file is compiled without OpenMP.
void parallel_for(std::int64_t count, std::int64_t grain, c10::function_ref<void(std::int64_t, std::int64_t)> body);

}  // namespace ddpkit::simd

namespace ddpkit::optim {

/// Elements per block: large enough for the overhead of a thread, small enough for an even partition.
constexpr std::size_t kBlockElements = std::size_t{1} << 14;
/// Minimum number of blocks for several threads.
constexpr std::int64_t kBlocksGrain = 4;

constexpr std::size_t blocks_of(std::size_t numel) { return (numel + kBlockElements - 1) / kBlockElements; }

/// Partitions the elements of tensors of different sizes among LibTorch's threads. Calls `body(task, begin, count)` for
/// elements [begin, begin + count) of tensor number `task`. The parts start at multiples of kBlockElements. Consecutive
/// blocks of one thread form one part.
template <class Body>
void for_blocks(const std::vector<std::size_t>& numels, const Body& body) {
  std::vector<std::size_t> ends;  // [task], in blocks
  std::size_t total = 0;
  for (const std::size_t numel : numels) ends.push_back(total += blocks_of(numel));
  const auto some = [&](std::int64_t first, std::int64_t last) {
    auto begin = static_cast<std::size_t>(first);
    const auto end = static_cast<std::size_t>(last);
    auto task = static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    for (; begin < end; ++task) {
      const std::size_t start = ends[task] - blocks_of(numels[task]);
      const std::size_t stop = std::min(end, ends[task]);
      if (stop == begin) continue;  // An empty tensor.
      const std::size_t from = (begin - start) * kBlockElements;
      body(task, from, std::min(numels[task], (stop - start) * kBlockElements) - from);
      begin = stop;
    }
  };
  simd::parallel_for(static_cast<std::int64_t>(total), kBlocksGrain, some);
}

/// Returns `pointer` plus `elements` of `element_bytes`; null for null.
template <class T>
T* advance(T* pointer, std::size_t elements, std::size_t element_bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return pointer ? static_cast<T*>(static_cast<Byte*>(pointer) + elements * element_bytes) : nullptr;
}

}  // namespace ddpkit::optim
