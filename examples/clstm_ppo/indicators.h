// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <vector>

namespace clstm_ppo {

/// Technical indicators, as their authors published them. Each value depends only on its day and earlier days. All
/// results have the length of their input. Days before the first defined value hold NaN.
///
/// Arguments of one call have equal lengths. [day]
using Series = std::vector<double>;

/// Moving Average Convergence/Divergence: the difference of the exponential averages over 12 and 26 days. Their weights
/// are 2 / (days + 1), and they begin with the first price. Defined from day `slow - 1`. G. Appel, "Technical Analysis:
/// Power Tools for Active Investors", 2005.
Series macd(const Series& close, int fast = 12, int slow = 26);

/// Relative Strength Index, 0 to 100: the share of upward moves. The first averages are plain means of `period`
/// changes, later ones are Wilder's: (old * (period - 1) + new) / period. Defined from day `period`; 50 if the price
/// did not change. J. W. Wilder, "New Concepts in Technical Trading Systems", 1978.
Series rsi(const Series& close, int period = 14);

/// Commodity Channel Index: the distance of the typical price, (high + low + close) / 3, from its mean over `period`
/// days, in units of 0.015 mean absolute deviations. Defined from day `period - 1`; 0 if the price did not change. D.
/// R. Lambert, "Commodity Channel Index: Tool for Trading Cyclic Trends", Commodities, October 1980.
Series cci(const Series& high, const Series& low, const Series& close, int period = 20);

/// Average Directional Index, 0 to 100: the strength of the trend in either direction. Uses Wilder's smoothing, started
/// by sums over the first `period` days. The first ADX is the mean of the first `period` directional movement indices.
/// Defined from day `2 * period - 1`. Wilder, as above.
Series adx(const Series& high, const Series& low, const Series& close, int period = 14);

/// The first day on which all indicators are defined with their default periods.
inline constexpr std::size_t kFirstDayOfAll = 27;

}  // namespace clstm_ppo
