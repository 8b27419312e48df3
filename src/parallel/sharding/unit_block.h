// Tier 1. A ShardedBlock in the memory of ParameterShards.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/where.h>

#include <cstddef>
#include <vector>

#include "tensor/flat_layout.h"

namespace ddpkit {

/// Parameters of one type: this rank's shard, and all elements while the unit is whole.
struct UnitBlock {
  FlatLayout layout;
  std::vector<std::size_t> members;  ///< Indices in `parameters`. [position]
  at::ScalarType dtype;              ///< Of `flat`.
  at::Tensor shard;                  ///< This rank's elements, in the type that the parameters had.
  at::Tensor flat = {};              ///< All elements, while the unit is whole.

  at::Tensor own_part(const at::Tensor& tensor, std::size_t position, int rank) const {
    const FlatLayout::Range range = layout.range(position, rank);
    return tensor.narrow(0, range.in_tensor, range.count);
  }
  at::Tensor piece(std::size_t position, int rank) const {
    const FlatLayout::Range range = layout.range(position, rank);
    return shard.narrow(0, range.in_shard, range.count);
  }
  /// Copies what was written to the parameter to the shard. Other elements keep the bits that `dtype` lacks.
  void write_back(std::size_t position, int rank) const {
    const at::Tensor own = piece(position, rank), now = own_part(gathered(position), position, rank);
    own.copy_(dtype == own.scalar_type() ? now : at::where(own.to(dtype) == now, own, now.to(own.scalar_type())));
  }
  at::Tensor gathered(std::size_t position) const {
    return flat.narrow(0, layout.offsets[position], layout.numels[position]);
  }
};

}  // namespace ddpkit
