// Tier 0: the standard library only. Packs tensors into one flat tensor, and cuts the flat tensor into one shard per
// rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddpkit {

/// Tensors in one flat tensor start on separate cache lines.
constexpr std::size_t kAlignment = 64;

/// Returns `numel` rounded up to whole cache lines, in elements.
constexpr std::int64_t aligned_numel(std::int64_t numel, std::size_t element_size) {
  const std::size_t bytes = static_cast<std::size_t>(numel) * element_size;
  return static_cast<std::int64_t>((bytes + kAlignment - 1) / kAlignment * kAlignment / element_size);
}

/// The places of tensors of one type in a flat tensor of `numel` elements. Rank r has the shard
/// [r * shard_numel, (r + 1) * shard_numel). All numbers are in elements.
struct FlatLayout {
  std::vector<std::int64_t> offsets, numels;  ///< Of each tensor, without padding. [position]
  std::int64_t shard_numel = 0;
  std::int64_t numel = 0;  ///< With padding: world_size * shard_numel.

  /// The elements that a tensor and a shard have in common. If there are none, all three are 0.
  struct Range {
    std::int64_t in_tensor = 0;  ///< The first element, counted from the start of the tensor.
    std::int64_t in_shard = 0;   ///< The first element, counted from the start of the shard.
    std::int64_t count = 0;
  };
  Range range(std::size_t position, int rank) const;
};

/// Pure function: returns the same on every rank. Tensors keep their order. Tensors and shards are whole cache lines,
/// so two ranks never write to the same cache line. The shards of the last ranks may consist of padding.
FlatLayout make_flat_layout(std::vector<std::int64_t> numels, std::size_t element_size, int world_size = 1);

}  // namespace ddpkit
