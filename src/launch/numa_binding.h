// Tier 0: the standard library only. CPU affinity of the ranks.
#pragma once

#include <string>
#include <vector>

#include <ddpkit/launch/launch_options.h>

namespace ddpkit::launcher {

/// Parses a CPU list in Linux format: "0-3,8" gives {0, 1, 2, 3, 8}. Throws InvalidArgument for other text.
std::vector<int> parse_cores(const std::string& text);

/// Returns the cores in `allowed` of each NUMA node, without empty nodes. Returns one node if the host has no NUMA
/// information. `root`: the folder of /sys; tests pass another one. [node]
std::vector<std::vector<int>> numa_nodes(const std::vector<int>& allowed, const std::string& root = "");

/// Returns the cores of each rank. Empty: the rank may run on all cores. Adjacent ranks share a node. With fewer cores
/// than ranks, kExclusive acts as kNode. [rank]
std::vector<std::vector<int>> divide_cores(const std::vector<std::vector<int>>& nodes, int ranks, NumaBinding binding);

}  // namespace ddpkit::launcher
