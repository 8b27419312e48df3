// Tier 0: the standard library only.
#pragma once

#include <string>
#include <vector>

namespace ddpkit::bench {

/// Returns the reason why PyTorch for Python cannot be measured here, in one sentence. Empty if it can.
std::string why_no_python();

/// Returns the folder of the built package ddpkit_torch; empty if the package is not built.
std::string python_package();

/// The same for torchft.
std::string why_no_torchft();

/// Returns the command that runs a script of benchmarks/peers with Python.
std::vector<std::string> python_command(const std::string& script);
/// The same with the Python that has torchft.
std::vector<std::string> torchft_command(const std::string& script);

}  // namespace ddpkit::bench
