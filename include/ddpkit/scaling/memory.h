// Tier 0: the standard library only.
#pragma once

namespace ddpkit::scaling {

/// A model for fully_sharded_memory(). Bytes are those of float32 elements, the type of the shards.
struct ShardedModelSize {
  double parameter_bytes = 0;    ///< All parameters.
  double unit_bytes = 0;         ///< The largest unit: see FullyShardedDataParallelBase::units().
  double root_bytes = 0;         ///< Parameters in no unit.
  double optimizer_states = 2;   ///< State elements per parameter: AdamW 2, SGD with momentum 1.
  int prefetch = 1;              ///< FullyShardedOptions::prefetch; 0 over `shm`.
  double gathered_fraction = 1;  ///< Bytes of a gathered element per byte of a shard: 0.5 with 16-bit param_dtype.
};

/// The memory of one rank in bytes, without activations and the program itself.
struct RankMemory {
  double weights = 0;                ///< The rank's shard.
  double gradients = 0;              ///< The rank's shard.
  double optimizer = 0;              ///< State of the rank's shard.
  double whole_units = 0;            ///< Gathered weights: 1 + prefetch units and the root.
  double gradients_in_progress = 0;  ///< Whole gradients of the unit in backward, of the unit before it, and the root.

  /// Returns the sum.
  double total() const noexcept { return weights + gradients + optimizer + whole_units + gradients_in_progress; }
};

/// Returns the memory of a rank of FullyShardedDataParallel with a ShardedOptimizer, after the first step. Rajbhandari
/// and others (arXiv 1910.02054, section 5.3) have the first three parts. Throws std::invalid_argument for values that
/// are negative or not a number, and for less than one rank.
RankMemory fully_sharded_memory(const ShardedModelSize& model, int ranks);

}  // namespace ddpkit::scaling
