// Tier 0: the standard library only.
#pragma once

#include <vector>

#include "clstm_ppo/market.h"

namespace clstm_ppo {

/// How a portfolio did.
struct Performance {
  double total_return = 0;  ///< Last value over the first, less 1.
  double sharpe = 0;  ///< Annualised: mean of the returns over their deviation, times the root of their number a year.
  double max_drawdown = 0;  ///< The largest loss from a peak, as a share of it: 0 .. 1.
};

/// Of the values of a portfolio, day by day, at least one. The Sharpe ratio takes the riskless rate as 0 and is 0 where
/// nothing moved. W. F. Sharpe, "The Sharpe Ratio", Journal of Portfolio Management 21(1), 1994. [day]
Performance performance_of(const std::vector<double>& values, double periods_per_year);

/// Value of a portfolio that spends all its money, in equal parts, on the first day and then waits. Costs included. The
/// period's days. [day]
std::vector<double> buy_and_hold(const Market& market, const Period& period, double initial_cash, double cost);

/// What the best that knows the pattern makes of a generated market: of all sequences of trades that know each day the
/// expected growth of every asset, today's and later, but not what chance adds, the one with the highest expected final
/// value; then its value on the prices as they came. Growth to the next day is independent of the past given the
/// pattern, so that expected final value is a product, linear in every trade: an optimum is among those that hold one
/// asset at a time or none, and dynamic programming backwards over the days finds it exactly. [day]
std::vector<double> best_with_pattern(const Market& market, const Period& period, double initial_cash, double cost);

}  // namespace clstm_ppo
