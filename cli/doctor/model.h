// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <string>

#include "finding.h"

namespace ddpkit::cli {

/// The model to train.
struct ModelPlan {
  double parameters = 0;
  std::string optimizer = "adam";       ///< sgd, momentum, adam, adamw.
  bool amp = false;                     ///< Mixed precision: computes in 16 bits, weights stay in 32 bits.
  std::int64_t batch = 32;              ///< Samples per device.
  double activation_mb_per_sample = 0;  ///< MiB of activations per sample; 0: unknown.
  bool sharded = false;                 ///< State (on shm also weights) sharded over the ranks.
  /// Fraction of the parameters in the largest unit of FullyShardedDataParallel, or in its root; 0: without it.
  double fsdp_unit = 0;
  int ranks = 1;
};

/// One use of memory.
struct MemoryItem {
  std::string name;
  double bytes = 0;
};

/// Returns the memory that one rank's device needs. On the CPU, the arena replaces the buckets.
std::vector<MemoryItem> memory_items(const ModelPlan& plan, bool on_gpu);

/// Checks whether the model fits into `free_bytes` of a device (`where`) and lists the items. `devices_share`: all
/// ranks use the same memory, as CPU ranks do.
Findings examine_model(const ModelPlan& plan, const std::string& where, double free_bytes, bool on_gpu);

}  // namespace ddpkit::cli
