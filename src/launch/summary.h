// Tier 0: the standard library only.
#pragma once

#include <string>

#include <ddpkit/launch/launcher.h>

namespace ddpkit::launch {

/// Returns lines with the rank's current activity and stack. `first_rank`: the first rank of this host in the job.
std::string describe(const SilentRank& rank, int first_rank);

}  // namespace ddpkit::launch
