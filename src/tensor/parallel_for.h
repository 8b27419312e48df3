// Tier 0: c10/util only.
#pragma once

#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace ddpkit::simd {

/// Calls `body(begin, end)` on parts of [0, count) on LibTorch's own threads, and returns when all is done; on this
/// thread alone where count < grain or at::get_num_threads() is 1. at::parallel_for would do the same, but is a
/// template that runs on one thread unless OpenMP is on where it is compiled.
void parallel_for(std::int64_t count, std::int64_t grain, c10::function_ref<void(std::int64_t, std::int64_t)> body);

}  // namespace ddpkit::simd

namespace ddpkit::optim {

/// Elements that one thread does at a time: enough to be worth a thread's start, few enough to share out evenly.
constexpr std::size_t kBlockElements = std::size_t{1} << 14;
/// Blocks from which on several threads are worth it.
constexpr std::int64_t kBlocksGrain = 4;

constexpr std::size_t blocks_of(std::size_t numel) { return (numel + kBlockElements - 1) / kBlockElements; }

/// Shares the elements of many tensors, the largest and the smallest, out among LibTorch's threads. Calls
/// `body(task, begin, count)` for elements [begin, begin + count) of tensor number `task`, in parts that start at
/// multiples of kBlockElements and are as long as one thread has them.
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

/// `pointer`, `elements` of `element_bytes` further on; null stays null.
template <class T>
T* advance(T* pointer, std::size_t elements, std::size_t element_bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return pointer ? static_cast<T*>(static_cast<Byte*>(pointer) + elements * element_bytes) : nullptr;
}

}  // namespace ddpkit::optim
