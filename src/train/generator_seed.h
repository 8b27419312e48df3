// Tier 0. By which epoch the random generators of this process were seeded.
#pragma once

#include <cstdint>
#include <optional>

namespace ddpkit::train {

/// What seed_epoch() has last seeded by; empty: it has not.
std::optional<std::uint64_t> generator_seed();

/// A checkpoint has put back the generators of an epoch seeded by `seed`.
void note_restored_generators(std::optional<std::uint64_t> seed);

}  // namespace ddpkit::train
