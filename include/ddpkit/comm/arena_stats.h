// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ddpkit {

/// Usage of this rank's arena of symmetric memory. All sizes are in bytes.
struct ArenaStats {
  std::size_t capacity = 0;       ///< Upper limit of the arena.
  std::size_t reserved = 0;       ///< Allocated from the system. Returned only when the arena is destroyed.
  std::size_t in_use = 0;         ///< Held by live tensors, with headers and rounding.
  std::size_t peak = 0;           ///< Largest value of in_use.
  std::uint64_t allocations = 0;  ///< Requests that the arena served.
  std::uint64_t refused = 0;      ///< Requests that went to malloc because the arena was full.
};

}  // namespace ddpkit
