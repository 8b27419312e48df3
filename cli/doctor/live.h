// Tier 0: the standard library only.
#pragma once

#include <string>

#include "finding.h"

namespace ddpkit::cli {

/// Starts `ranks` processes that all-reduce with `backend` for real, and says how fast; a problem when they fail, with
/// what the first of them said.
Findings live_all_reduce(const std::string& backend, int ranks);

/// What such a process does. Returns its exit code.
int run_doctor_rank(const std::string& backend);

}  // namespace ddpkit::cli
