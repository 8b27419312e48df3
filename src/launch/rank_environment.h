// Tier 0: the standard library only.
#pragma once

#include <string>
#include <vector>

#include <ddpkit/launch/launcher.h>

namespace ddpkit::launch {

/// The environment of rank `rank` of this host: this process's, torchrun's variables, the options'. `page`: descriptor
/// of the rank's flight recorder. "NAME=value"
std::vector<std::string> rank_environment(const LocalLaunchOptions& options, int rank, int port, int page);

}  // namespace ddpkit::launch
