// Tier 0: the standard library only.
#pragma once

#include <cstdint>

namespace ddpkit {

/// Tells the flight recorder how far training has come, for what `ddpkit run` says of a rank that fails or hangs. A
/// store; any thread.
///
/// The recorder itself needs no calls: every rank keeps its last 256 collectives in memory that its launcher can read,
/// also after the rank's death.
void note_step(std::int64_t step) noexcept;

}  // namespace ddpkit
