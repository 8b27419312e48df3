// Tier 0: the standard library only.
#pragma once

#include <vector>

#include "clstm_ppo/market.h"

namespace clstm_ppo {

/// The performance of a portfolio.
struct Performance {
  double total_return = 0;  ///< Last value divided by the first, minus 1.
  double sharpe = 0;  ///< Annualised: mean of the returns divided by their standard deviation, times the square root of
                      ///< the returns per year.
  double max_drawdown = 0;  ///< The largest loss since a peak, as a share of the peak: 0 .. 1.
};

/// Computes the performance from the daily values of a portfolio, at least one. The Sharpe ratio assumes a riskless
/// rate of 0, and is 0 if the value did not change. W. F. Sharpe, "The Sharpe Ratio", Journal of Portfolio Management
/// 21(1), 1994. [day]
Performance performance_of(const std::vector<double>& values, double periods_per_year);

/// Returns the value of a portfolio that buys equal parts of all assets on the first day and then holds them, including
/// costs. [day of the period]
std::vector<double> buy_and_hold(const Market& market, const Period& period, double initial_cash, double cost);

/// Returns the value of the best policy that knows the pattern of a generated market. It knows the expected growth of
/// each asset on each day, but not the noise. It maximizes the expected final value; the result is its value at the
/// actual prices. Given the pattern, growth is independent of the past, so the expected final value is a product and
/// linear in each trade. So an optimal policy holds one asset or only cash at a time, and backward dynamic programming
/// over the days finds it exactly. [day]
std::vector<double> best_with_pattern(const Market& market, const Period& period, double initial_cash, double cost);

}  // namespace clstm_ppo
