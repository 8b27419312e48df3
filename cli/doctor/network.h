// Tier 0: the standard library only.
#pragma once

#include <string>

#include "finding.h"

namespace ddpkit::cli {

/// Whether ranks can meet at `master_addr`:`master_port`: the name resolves, and where it is this host, nobody listens
/// there yet. Also whether this host's own name resolves, as launchers of several hosts need it.
Findings examine_network(const std::string& master_addr, int master_port);

}  // namespace ddpkit::cli
