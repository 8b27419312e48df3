// Tier 0: the standard library only.
#pragma once

#include <cstdint>

namespace ddpkit::train {

/// Returns a seed for each run seed, epoch and rank, so that dropout and augmentation differ between ranks. For the
/// default random generators call seed_epoch(), which can resume within an epoch. Mixed by splitmix64 (Steele et al.
/// 2014), so that nearby seeds, epochs and ranks give unrelated results.
std::uint64_t epoch_seed(std::uint64_t seed, std::int64_t epoch, int rank) noexcept;

/// Seeds the default random generators of CPU and GPUs with epoch_seed(), at the beginning of an epoch. If
/// load_checkpoint() has restored the generators of this epoch, the call keeps them, so that the epoch draws the same
/// numbers as without the interruption. Returns whether it has seeded.
bool seed_epoch(std::uint64_t seed, std::int64_t epoch, int rank);

}  // namespace ddpkit::train
