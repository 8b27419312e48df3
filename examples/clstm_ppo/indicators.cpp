#include "clstm_ppo/indicators.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace clstm_ppo {
namespace {

Series undefined(std::size_t days) { return Series(days, std::numeric_limits<double>::quiet_NaN()); }

/// Returns `neither` if both are 0.
double share(double a, double b, double neither) { return a + b > 0 ? a / (a + b) : neither; }

}  // namespace

Series macd(const Series& close, int fast, int slow) {
  Series result = undefined(close.size());
  if (close.empty()) return result;
  double fast_average = close.front(), slow_average = close.front();
  for (std::size_t day = 0; day < close.size(); ++day) {
    fast_average += (close[day] - fast_average) * 2 / (fast + 1);
    slow_average += (close[day] - slow_average) * 2 / (slow + 1);
    if (day + 1 >= static_cast<std::size_t>(slow)) result[day] = fast_average - slow_average;
  }
  return result;
}

Series rsi(const Series& close, int period) {
  Series result = undefined(close.size());
  double gains = 0, losses = 0;  // Averages, defined from day `period`.
  for (std::size_t day = 1; day < close.size(); ++day) {
    const double change = close[day] - close[day - 1];
    const double gain = std::max(change, 0.0), loss = std::max(-change, 0.0);
    if (day <= static_cast<std::size_t>(period)) {
      gains += gain / period;
      losses += loss / period;
    } else {
      gains = (gains * (period - 1) + gain) / period;
      losses = (losses * (period - 1) + loss) / period;
    }
    if (day >= static_cast<std::size_t>(period)) result[day] = 100 * share(gains, losses, 0.5);
  }
  return result;
}

Series cci(const Series& high, const Series& low, const Series& close, int period) {
  Series typical(close.size());
  for (std::size_t day = 0; day < close.size(); ++day) typical[day] = (high[day] + low[day] + close[day]) / 3;
  Series result = undefined(close.size());
  const auto days = static_cast<std::size_t>(period);
  for (std::size_t day = days - 1; day < close.size(); ++day) {
    double mean = 0, deviation = 0;
    for (std::size_t i = day + 1 - days; i <= day; ++i) mean += typical[i] / period;
    for (std::size_t i = day + 1 - days; i <= day; ++i) deviation += std::abs(typical[i] - mean) / period;
    // A deviation as small as the rounding errors counts as 0.
    result[day] = deviation > 1e-12 * std::abs(mean) ? (typical[day] - mean) / (0.015 * deviation) : 0;
  }
  return result;
}

Series adx(const Series& high, const Series& low, const Series& close, int period) {
  Series result = undefined(close.size());
  const auto first = static_cast<std::size_t>(period);
  double range = 0, up = 0, down = 0;  // Wilder's sums.
  double average = 0;
  for (std::size_t day = 1; day < close.size(); ++day) {
    const double rise = high[day] - high[day - 1], fall = low[day - 1] - low[day];
    const double true_range =
        std::max({high[day] - low[day], std::abs(high[day] - close[day - 1]), std::abs(low[day] - close[day - 1])});
    const double keep = day > first ? 1 - 1.0 / period : 1;
    range = range * keep + true_range;
    up = up * keep + (rise > fall && rise > 0 ? rise : 0);
    down = down * keep + (fall > rise && fall > 0 ? fall : 0);
    if (day < first) continue;
    // Both directions would be divided by the range, which cancels out. A range of 0 gives an index of 0.
    const double index = range > 0 && up + down > 0 ? 100 * std::abs(up - down) / (up + down) : 0;
    if (day < 2 * first) {
      average += index / period;
    } else {
      average = (average * (period - 1) + index) / period;
    }
    if (day + 1 >= 2 * first) result[day] = average;
  }
  return result;
}

}  // namespace clstm_ppo
