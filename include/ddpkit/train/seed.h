// Tier 0: the standard library only.
#pragma once

#include <cstdint>

namespace ddpkit::train {

/// A run's seed, made different for each epoch and rank. Dropout and augmentation seeded by it draw differently on each
/// rank. For the default random generators call seed_epoch(), which resumes within an epoch. Mixed by splitmix64
/// (Steele et al. 2014), so that neighbouring seeds, epochs and ranks share nothing.
std::uint64_t epoch_seed(std::uint64_t seed, std::int64_t epoch, int rank) noexcept;

/// Seeds the random generators of CPU and GPUs by epoch_seed(), at the beginning of an epoch. If load_checkpoint() has
/// put back the generators of this epoch, the call keeps them: the epoch draws what it would have drawn without the
/// interruption. Returns whether it has seeded.
bool seed_epoch(std::uint64_t seed, std::int64_t epoch, int rank);

}  // namespace ddpkit::train
