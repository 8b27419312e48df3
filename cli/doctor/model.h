// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <string>

#include "finding.h"

namespace ddpkit::cli {

/// A model that somebody wants to train.
struct ModelPlan {
  double parameters = 0;
  std::string optimizer = "adam";       ///< sgd, momentum, adam, adamw.
  bool amp = false;                     ///< Mixed precision: computes in 16 bits, weights stay in 32.
  std::int64_t batch = 32;              ///< Samples on a device.
  double activation_mb_per_sample = 0;  ///< MiB that forward keeps for backward, of one sample; 0: unknown.
  bool sharded = false;                 ///< State (and on shm weights) shared out over the ranks.
  int ranks = 1;
};

/// One thing that takes memory.
struct MemoryItem {
  std::string name;
  double bytes = 0;
};

/// What one rank's device has to hold. On the CPU the arena's reserve takes the buckets' place.
std::vector<MemoryItem> memory_items(const ModelPlan& plan, bool on_gpu);

/// Whether it fits into `free_bytes` of a device (`where`), item by item; `devices_share`: all ranks take from the same
/// memory, as CPU ranks do.
Findings examine_model(const ModelPlan& plan, const std::string& where, double free_bytes, bool on_gpu);

}  // namespace ddpkit::cli
