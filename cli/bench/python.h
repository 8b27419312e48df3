// Tier 0: the standard library only.
#pragma once

#include <string>
#include <vector>

namespace ddpkit::bench {

/// Why Python's PyTorch cannot be measured here, in one sentence; empty when it can.
std::string why_no_python();

/// Python with one of the scripts in benchmarks/peers.
std::vector<std::string> python_command(const std::string& script);

}  // namespace ddpkit::bench
