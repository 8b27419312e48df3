// Tier 2: torch/nn/module.h. The units of a module for FullyShardedDataParallel.
#pragma once

#include <vector>

#include <ddpkit/parallel/fully_sharded_data_parallel.h>

#include "parallel/sharding/parameter_shards.h"

namespace ddpkit {

/// Collective. Returns the units of a module: those of fully_shard() first, the root last. Throws on all ranks if the
/// models differ, or for a model that cannot be sharded.
std::vector<ShardedUnit> agree_on_units(torch::nn::Module& module, const ProcessGroup& group,
                                        const FullyShardedOptions& options);

}  // namespace ddpkit
