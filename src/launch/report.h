// Tier 0: the standard library only. The cause of a failed launch.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <ddpkit/launch/launch_options.h>

#include "comm/trace/event_ring.h"

namespace ddpkit::launcher {

/// The launcher's knowledge of a rank after another rank has failed.
struct Evidence {
  FailureKind failure = FailureKind::kNone;     ///< Failure of its first failed collective.
  std::optional<std::size_t> failed_rank = {};  ///< Rank of this launcher that the failed collective blames.
  bool running = true;
  bool has_left = false;             ///< The rank left the group of all ranks.
  bool ended_independently = false;  ///< Not ended by the launcher's signal.
  bool ended_well = false;           ///< With exit code 0.
};

/// Returns whether a rank with this failure has lost another rank.
bool lost_another(FailureKind failure);

/// Returns the ranks that may have caused the end of rank `first`, the most likely first. Empty if `first` failed
/// itself. A rank that lost a peer blames this peer, which may blame another rank in turn. Some backends blame no rank:
/// then returns all ranks that left the group and lost no peer. `ended`: ranks in the order of their ends.
std::vector<std::size_t> suspects(std::size_t first, const std::vector<Evidence>& ranks,
                                  const std::vector<std::size_t>& ended);

/// Returns lines with the rank's current activity and stack. `first_rank`: the first rank of this host in the job.
std::string describe(const HungRank& rank, int first_rank);

}  // namespace ddpkit::launcher
