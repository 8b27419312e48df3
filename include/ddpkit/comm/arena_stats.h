// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ddpkit {

/// What an arena of symmetric memory holds, in bytes of this rank.
struct ArenaStats {
  std::size_t capacity = 0;       ///< It never grows beyond.
  std::size_t reserved = 0;       ///< Taken from the system; never given back before the arena ends.
  std::size_t in_use = 0;         ///< By live tensors, with what stands before them and rounding up.
  std::size_t peak = 0;           ///< The largest in_use has been.
  std::uint64_t allocations = 0;  ///< Requests it has served.
  std::uint64_t refused = 0;      ///< Requests it has left to malloc, being full.
};

}  // namespace ddpkit
