// Tier 0: the standard library only. Which cores a rank runs on.
#pragma once

#include <string>
#include <vector>

#include <ddpkit/launch/launcher.h>

namespace ddpkit::launch {

/// "0-3,8" gives {0, 1, 2, 3, 8}: how Linux writes sets of cores. Throws InvalidArgument for anything else.
std::vector<int> parse_cores(const std::string& text);

/// Cores of each NUMA node, of those in `allowed`; nodes without any are left out. One node where the host tells of
/// none. `root`: where /sys is; another one in tests. [node]
std::vector<std::vector<int>> numa_nodes(const std::vector<int>& allowed, const std::string& root = "");

/// The cores for each of `ranks` ranks; empty for a rank that may run on all. Ranks next to each other share a node.
/// Where there are fewer cores than ranks, kExclusive is as kNode. [rank]
std::vector<std::vector<int>> divide_cores(const std::vector<std::vector<int>>& nodes, int ranks, NumaBinding binding);

}  // namespace ddpkit::launch
