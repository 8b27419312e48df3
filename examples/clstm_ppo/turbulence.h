// Tier 0: the standard library only.
#pragma once

#include <vector>

namespace clstm_ppo {

/// Returns how unusual each day is: the squared Mahalanobis distance of its returns from the returns of the `days` days
/// before. 0 for the first `days` days. `returns`: [day][asset]. M. Kritzman and Y. Li, "Skulls, Financial Turbulence,
/// and Risk Management", Financial Analysts Journal 66(5), 2010.
std::vector<double> turbulence(const std::vector<std::vector<double>>& returns, int days);

}  // namespace clstm_ppo
