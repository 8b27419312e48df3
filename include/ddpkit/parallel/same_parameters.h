// Tier 2: torch/nn/module.h.
#pragma once

#include <ddpkit/parallel/distributed_data_parallel.h>

namespace ddpkit {

/// Collective, between steps. Throws ModelMismatch on all ranks if a parameter that `ddp` averages has other values on
/// one rank, and names it: a step on one rank only, or a write outside the optimizer. Reads all parameters once; call
/// it at checkpoints.
void check_same_parameters(const DistributedDataParallelBase& ddp);

}  // namespace ddpkit
