// Tier 0 and CLI11.
#pragma once

#include <string>
#include <vector>

#include "plan.h"

namespace ddpkit::bench {

/// Name of the program that benchmarks/openmpi_collectives.cpp becomes, beside ddpkit.
inline constexpr const char* kOpenMpiProgram = "openmpi_collectives";

/// Why Open MPI cannot be measured here, in one sentence; empty when it can.
std::string why_no_openmpi();

/// The command that measures the plan with Open MPI and prints the rows, as to_report() writes them.
std::vector<std::string> openmpi_command(int ranks, const Plan& plan);

}  // namespace ddpkit::bench
