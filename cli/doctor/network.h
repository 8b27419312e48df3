// Tier 0: the standard library only.
#pragma once

#include <string>

#include "finding.h"

namespace ddpkit::cli {

/// Checks whether ranks can rendezvous at `master_addr`:`master_port`: the name resolves and, on this host, the port is
/// free. Also checks whether the host's own name resolves, because launchers on several hosts need it.
Findings examine_network(const std::string& master_addr, int master_port);

}  // namespace ddpkit::cli
