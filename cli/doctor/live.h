// Tier 0: the standard library only.
#pragma once

#include <string>

#include "finding.h"

namespace ddpkit::cli {

/// Starts `ranks` processes that run all-reduce with `backend`, and reports the speed. If they fail, returns a problem
/// with the first rank's error.
Findings live_all_reduce(const std::string& backend, int ranks);

/// Runs one of these processes. Returns its exit code.
int run_doctor_rank(const std::string& backend);

}  // namespace ddpkit::cli
