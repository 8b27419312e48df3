// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <vector>

namespace clstm_ppo {

/// Technical indicators, as their authors published them. Each value depends on its day and those before it alone. All
/// results have the length of their input; days before the first on which the indicator is defined hold NaN.
///
/// Arguments of one call have equal lengths. [day]
using Series = std::vector<double>;

/// Moving Average Convergence/Divergence: the difference of the exponential averages over 12 and 26 days, whose weights
/// are 2 / (days + 1) and which begin with the first price. From day `slow - 1` on. G. Appel, "Technical Analysis:
/// Power Tools for Active Investors", 2005.
Series macd(const Series& close, int fast = 12, int slow = 26);

/// Relative Strength Index, 0 to 100: what share of the moves went up. The first averages are plain means of `period`
/// changes, later ones Wilder's: (old * (period - 1) + new) / period. From day `period` on; 50 where nothing moved.
/// J. W. Wilder, "New Concepts in Technical Trading Systems", 1978.
Series rsi(const Series& close, int period = 14);

/// Commodity Channel Index: how far the typical price, (high + low + close) / 3, is from its mean over `period` days,
/// in units of 0.015 mean absolute deviations. From day `period - 1` on; 0 where nothing moved. D. R. Lambert,
/// "Commodity Channel Index: Tool for Trading Cyclic Trends", Commodities, October 1980.
Series cci(const Series& high, const Series& low, const Series& close, int period = 20);

/// Average Directional Index, 0 to 100: how steady the trend is, whichever way it goes. Wilder's smoothing throughout,
/// begun by sums over the first `period` days; the first ADX is the mean of the first `period` directional movement
/// indices. From day `2 * period - 1` on. Wilder, as above.
Series adx(const Series& high, const Series& low, const Series& close, int period = 14);

/// The first day on which all of them are defined with their default periods.
inline constexpr std::size_t kFirstDayOfAll = 27;

}  // namespace clstm_ppo
