// Tier 0. The seed of this process's random generators.
#pragma once

#include <cstdint>
#include <optional>

namespace ddpkit::train {

/// Returns the last seed of seed_epoch(); empty if it was not called.
std::optional<std::uint64_t> generator_seed();

/// Records that a checkpoint restored generators seeded by `seed`.
void note_restored_generators(std::optional<std::uint64_t> seed);

}  // namespace ddpkit::train
