// Tier 0: the standard library only.
#pragma once

#include <string>
#include <vector>

#include "plan.h"

namespace ddpkit::bench {

/// Exit code of a rank whose backend is not available in this build or on this host. The rank prints the reason after
/// kReason.
inline constexpr int kNoBackend = 77;
inline constexpr std::string_view kReason = "ddpkit bench has no backend: ";

/// Returns the collectives that a ProcessGroup has.
std::vector<std::string> group_collectives();

/// Runs one rank of `ddpkit bench collectives`: joins the group of its environment, checks and measures the plan. Rank
/// 0 prints the rows in the format of to_report(). Returns the exit code.
int run_rank(const std::string& backend, const Plan& plan);

}  // namespace ddpkit::bench
