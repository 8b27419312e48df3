// Tier 0: the standard library only. One start of the ranks of this host.
#pragma once

#include <ddpkit/launch/launch_options.h>

namespace ddpkit::launcher {

class HostRounds;

/// Starts the ranks and waits for them. `hosts`: the other hosts of the round, which end it together; null: this host
/// does not know the others.
LaunchResult launch_round(const LaunchOptions& options, HostRounds* hosts);

}  // namespace ddpkit::launcher
