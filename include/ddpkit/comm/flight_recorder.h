// Tier 0: the standard library only.
#pragma once

#include <cstdint>

namespace ddpkit {

/// Records the number of the current training step. `ddpkit run` prints the step if a rank fails or hangs. Costs one
/// store. Thread-safe.
///
/// The flight recorder needs no other calls. Every rank keeps its last 256 collectives in memory that the launcher can
/// read, also after the rank's death.
void note_step(std::int64_t step) noexcept;

}  // namespace ddpkit
