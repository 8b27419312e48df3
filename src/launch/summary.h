// Tier 0: the standard library only.
#pragma once

#include <string>

#include <ddpkit/launch/launcher.h>

namespace ddpkit::launch {

/// What the rank does, and its stack, in lines. `first_rank`: of this host, in the job.
std::string describe(const SilentRank& rank, int first_rank);

}  // namespace ddpkit::launch
