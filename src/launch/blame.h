// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "comm/trace/page.h"

namespace ddpkit::launch {

/// What a launcher knows of a rank when another one has failed.
struct Evidence {
  flight::Failure failure = flight::Failure::kNone;  ///< Of its first collective that failed.
  std::optional<std::size_t> culprit = {};           ///< Among this launcher's ranks, if that collective blames one.
  bool running = true;
  bool has_left = false;         ///< The group of all ranks.
  bool ended_by_itself = false;  ///< For another reason than the launcher's signal.
  bool ended_well = false;       ///< With exit code 0.
};

/// The ranks that may have caused the end of rank `first`, the likeliest first; empty if its own failure did. A rank
/// that lost another one blames that rank. The blamed rank may blame another one in turn. Some backends blame no rank:
/// then all ranks that left the others, and lost none themselves. `ended`: ranks in the order of their ends.
std::vector<std::size_t> suspects(std::size_t first, const std::vector<Evidence>& ranks,
                                  const std::vector<std::size_t>& ended);

}  // namespace ddpkit::launch
