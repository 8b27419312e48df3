// Tier 0 and CLI11.
#pragma once

#include <string>
#include <vector>

#include "plan.h"

namespace ddpkit::bench {

/// Exit code of a rank whose backend this build or host lacks; the reason is in its output, behind kReason.
inline constexpr int kNoBackend = 77;
inline constexpr std::string_view kReason = "ddpkit bench has no backend: ";

/// Collectives that a ProcessGroup has.
std::vector<std::string> group_collectives();

/// What one rank of a `ddpkit bench collectives` does: joins the group that its environment names, checks and measures
/// all of the plan; rank 0 prints the rows, as to_report() writes them. Returns the exit code.
int run_rank(const std::string& backend, const Plan& plan);

}  // namespace ddpkit::bench
