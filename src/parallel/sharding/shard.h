// Tier 0. How a parameter's elements are divided among ranks.
#pragma once

#include <cstdint>

#include "comm/shm/operation.h"

namespace ddpkit {

/// Elements [begin, begin + count) of a parameter, in the order they lie in memory.
struct Shard {
  std::int64_t begin = 0;
  std::int64_t count = 0;
};

/// Rank `rank`'s part of `numel` elements: whole cache lines, the first ranks' parts of equal size, the last ones'
/// smaller or empty. The same on every backend, so that state can move between them.
inline Shard shard_of(std::int64_t numel, std::size_t element_size, int rank, int ranks) {
  const shm::Span slice = shm::slice_of(static_cast<std::size_t>(numel), element_size, rank, ranks);
  return {static_cast<std::int64_t>(slice.begin), static_cast<std::int64_t>(slice.count)};
}

}  // namespace ddpkit
