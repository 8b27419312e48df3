// Tier 1: ATen/core/Tensor.h. Partitions a parameter's elements among ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "comm/shm/operation.h"

namespace ddpkit {

/// Elements [begin, begin + count) of a parameter, in memory order.
struct Shard {
  std::int64_t begin = 0;
  std::int64_t count = 0;

  /// Returns the shard of a one-dimensional tensor.
  at::Tensor of(const at::Tensor& whole) const { return whole.narrow(0, begin, count); }
};

/// Returns the shard of rank `rank` of a dense tensor, in whole cache lines. The first ranks have shards of equal size;
/// the shards of the last ranks may be smaller or empty. Equal on every backend, so state can move between backends.
inline Shard shard_of(const at::Tensor& tensor, int rank, int ranks) {
  const shm::Span slice = shm::slice_of(static_cast<std::size_t>(tensor.numel()), tensor.element_size(), rank, ranks);
  return {static_cast<std::int64_t>(slice.begin), static_cast<std::int64_t>(slice.count)};
}

/// Returns a dense tensor's elements in memory order.
inline at::Tensor in_order(const at::Tensor& tensor) { return tensor.detach().as_strided({tensor.numel()}, {1}); }

}  // namespace ddpkit
