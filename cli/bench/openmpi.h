// Tier 0: the standard library only.
#pragma once

#include <string>
#include <vector>

#include "plan.h"

namespace ddpkit::bench {

/// Name of the program built from benchmarks/openmpi_collectives.cpp, in the folder of ddpkit.
inline constexpr const char* kOpenMpiProgram = "openmpi_collectives";

/// Returns the reason why Open MPI cannot be measured here, in one sentence. Empty if it can.
std::string why_no_openmpi();

/// Returns the command that measures the plan with Open MPI and prints the rows in the format of to_report().
std::vector<std::string> openmpi_command(int ranks, const Plan& plan);

}  // namespace ddpkit::bench
