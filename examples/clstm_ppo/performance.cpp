#include "clstm_ppo/performance.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace clstm_ppo {

Performance performance_of(const std::vector<double>& values, double periods_per_year) {
  Performance result{.total_return = values.back() / values.front() - 1};
  double peak = values.front(), mean = 0, squares = 0;
  for (const double value : values) {
    peak = std::max(peak, value);
    result.max_drawdown = std::max(result.max_drawdown, 1 - value / peak);
  }
  const auto returns = static_cast<double>(values.size() - 1);
  for (std::size_t day = 1; day < values.size(); ++day) mean += (values[day] / values[day - 1] - 1) / returns;
  for (std::size_t day = 1; day < values.size(); ++day)
    squares += std::pow(values[day] / values[day - 1] - 1 - mean, 2);
  const double deviation = returns > 1 ? std::sqrt(squares / (returns - 1)) : 0;
  // A deviation as small as the rounding errors counts as 0.
  if (deviation > 1e-12) result.sharpe = mean / deviation * std::sqrt(periods_per_year);
  return result;
}

std::vector<double> buy_and_hold(const Market& market, const Period& period, double initial_cash, double cost) {
  const double part = initial_cash / static_cast<double>(market.assets()) / (1 + cost);
  std::vector<double> values = {initial_cash};
  for (std::size_t day = period.first + 1; day < period.last; ++day) {
    double value = 0;
    for (std::size_t asset = 0; asset < market.assets(); ++asset)
      value += part * market.close(day, asset) / market.close(period.first, asset);
    values.push_back(value);
  }
  return values;
}

std::vector<double> best_with_pattern(const Market& market, const Period& period, double initial_cash, double cost) {
  const std::size_t places = market.assets() + 1;  // A place for the money: cash, or one asset.
  const auto growth = [&](std::size_t day, std::size_t place) {
    return place == 0 ? 1.0 : market.expected_growth(day, place - 1);
  };
  // The part of 1 that remains after costs when money moves from one place to another.
  const auto kept = [&](std::size_t from, std::size_t to) {
    if (from == to) return 1.0;
    return (from == 0 ? 1.0 : 1 - cost) / (to == 0 ? 1.0 : 1 + cost);
  };
  const std::size_t steps = period.days() - 1;
  std::vector<std::vector<std::size_t>> best(steps, std::vector<std::size_t>(places));  // Next place. [step][place]
  std::vector<double> worth(places, 1.0);  // Expected final value of 1 in a place, before the step's trade.
  for (std::size_t step = steps; step-- > 0;) {
    std::vector<double> before(places, 0.0);
    for (std::size_t from = 0; from < places; ++from) {
      for (std::size_t to = 0; to < places; ++to) {
        const double value = kept(from, to) * growth(period.first + step, to) * worth[to];
        if (value > before[from]) {
          before[from] = value;
          best[step][from] = to;
        }
      }
    }
    worth = std::move(before);
  }
  std::vector<double> values = {initial_cash};
  std::size_t place = 0;
  for (std::size_t step = 0; step < steps; ++step) {
    const std::size_t to = best[step][place], day = period.first + step;
    double value = values.back() * kept(place, to);
    if (to > 0) value *= market.close(day + 1, to - 1) / market.close(day, to - 1);
    values.push_back(value);
    place = to;
  }
  return values;
}

}  // namespace clstm_ppo
