// Tier 2: c10d's Types.hpp.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "comm/shm/engine.h"

namespace ddpkit {

/// All-reduce of sparse tensors; the number of entries may differ between ranks. Synchronous: the sizes of the parts
/// must be known before the parts can be exchanged.
void all_reduce_sparse(shm::Engine& engine, const at::Tensor& tensor, const c10d::ReduceOp& op);

}  // namespace ddpkit
