// Tier 0: the standard library only.
#pragma once

#include <string>
#include <vector>

#include <ddpkit/launch/launcher.h>

namespace ddpkit::launch {

/// Returns the environment of rank `rank` of this host as "NAME=value": that of this process, then torchrun's
/// variables, then those of the options. `page`: descriptor of the rank's flight recorder.
std::vector<std::string> rank_environment(const LocalLaunchOptions& options, int rank, int port, int page);

}  // namespace ddpkit::launch
