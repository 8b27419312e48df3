#include "tensor/flat_layout.h"

#include <algorithm>
#include <utility>

namespace ddpkit {

FlatLayout::Range FlatLayout::range(std::size_t position, int rank) const {
  const std::int64_t shard = rank * shard_numel;
  const std::int64_t begin = std::max(offsets[position], shard);
  const std::int64_t end = std::min(offsets[position] + numels[position], shard + shard_numel);
  if (begin >= end) return {};
  return {.in_tensor = begin - offsets[position], .in_shard = begin - shard, .count = end - begin};
}

FlatLayout make_flat_layout(std::vector<std::int64_t> numels, std::size_t element_size, int world_size) {
  FlatLayout layout;
  layout.numels = std::move(numels);
  for (const std::int64_t numel : layout.numels) {
    layout.offsets.push_back(layout.numel);
    layout.numel += aligned_numel(numel, element_size);
  }
  layout.shard_numel = aligned_numel((layout.numel + world_size - 1) / world_size, element_size);
  layout.numel = world_size * layout.shard_numel;
  return layout;
}

}  // namespace ddpkit
