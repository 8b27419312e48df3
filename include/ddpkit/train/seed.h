// Tier 0: the standard library only.
#pragma once

#include <cstdint>

namespace ddpkit::train {

/// A run's seed, made different for each epoch and rank. With it, dropout and augmentation draw differently on each
/// rank, and a resumed run draws what the run would have drawn had it never stopped. Mixed by splitmix64 (Steele et
/// al. 2014), so that neighbouring seeds, epochs and ranks share nothing.
std::uint64_t epoch_seed(std::uint64_t seed, std::int64_t epoch, int rank) noexcept;

}  // namespace ddpkit::train
