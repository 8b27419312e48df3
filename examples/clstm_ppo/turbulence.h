// Tier 0: the standard library only.
#pragma once

#include <vector>

namespace clstm_ppo {

/// The squared Mahalanobis distance of each day's returns from those of the `days` days before: how unusual the day is.
/// 0 for the first `days` days. `returns`: [day][asset]. M. Kritzman and Y. Li, "Skulls, Financial Turbulence, and Risk
/// Management", Financial Analysts Journal 66(5), 2010.
std::vector<double> turbulence(const std::vector<std::vector<double>>& returns, int days);

}  // namespace clstm_ppo
