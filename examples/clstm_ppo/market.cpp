#include "clstm_ppo/market.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <ddpkit/train/random.h>

#include "clstm_ppo/indicators.h"
#include "clstm_ppo/turbulence.h"

namespace clstm_ppo {
namespace {

constexpr double kSecondsPerYear = 365.25 * 86400;

// Returns of every day except the first. [day][asset]
std::vector<std::vector<double>> returns_of(const std::vector<PriceSeries>& series) {
  std::vector<std::vector<double>> returns;
  for (std::size_t day = 1; day < series.front().size(); ++day) {
    std::vector<double>& row = returns.emplace_back();
    for (const PriceSeries& one : series) row.push_back(one.close[day] / one.close[day - 1] - 1);
  }
  return returns;
}

}  // namespace

std::size_t Market::least_days(std::size_t days) { return kFirstDayOfAll + days; }

Market::Market(const std::vector<PriceSeries>& series, const MarketOptions& options) {
  const std::size_t all = series.front().size(), first = kFirstDayOfAll, kept = all - first, count = series.size();
  const std::vector<double> unusual = ::clstm_ppo::turbulence(returns_of(series), options.turbulence_days);
  turbulence_.assign(unusual.begin() + static_cast<std::ptrdiff_t>(first - 1), unusual.end());
  dates_.assign(series.front().dates.begin() + static_cast<std::ptrdiff_t>(first), series.front().dates.end());
  closes_.resize(kept * count);
  signals_.resize(kept * count * kSignals);
  const bool planted =
      std::all_of(series.begin(), series.end(), [](const PriceSeries& one) { return !one.expected_growth.empty(); });
  if (planted) expected_growth_.resize(kept * count);
  for (std::size_t asset = 0; asset < count; ++asset) {
    const PriceSeries& one = series[asset];
    names_.push_back(one.name);
    const Series averages = macd(one.close), strength = rsi(one.close), channel = cci(one.high, one.low, one.close),
                 trend = adx(one.high, one.low, one.close);
    for (std::size_t day = 0; day < kept; ++day) {
      const std::size_t bar = first + day, place = day * count + asset;
      closes_[place] = one.close[bar];
      if (planted) expected_growth_[place] = one.expected_growth[bar];
      double* const signals = &signals_[place * kSignals];
      signals[kReturn] = std::log(one.close[bar] / one.close[bar - 1]);
      signals[kMacd] = averages[bar] / one.close[bar];
      signals[kRsi] = strength[bar];
      signals[kCci] = channel[bar];
      signals[kAdx] = trend[bar];
    }
  }
  const double seconds = static_cast<double>(series.front().times.back() - series.front().times.front());
  periods_per_year_ = static_cast<double>(all - 1) * kSecondsPerYear / seconds;
}

double Market::turbulence_quantile(const Period& period, double share) const {
  if (share >= 1) return std::numeric_limits<double>::infinity();
  std::vector<double> values(turbulence_.begin() + static_cast<std::ptrdiff_t>(period.first),
                             turbulence_.begin() + static_cast<std::ptrdiff_t>(period.last));
  // Days without enough history have no turbulence.
  std::erase(values, 0.0);
  if (values.empty()) return std::numeric_limits<double>::infinity();
  std::sort(values.begin(), values.end());
  const auto place = static_cast<std::size_t>(share * static_cast<double>(values.size()));
  return values[std::min(place, values.size() - 1)];
}

std::vector<PriceSeries> shuffled(const std::vector<PriceSeries>& series, double first_part, std::uint64_t seed) {
  const std::size_t days = series.front().size();
  const auto middle =
      std::clamp(static_cast<std::size_t>(first_part * static_cast<double>(days)), std::size_t{1}, days - 1);
  ddpkit::train::Random random(seed);
  std::vector<std::size_t> order;  // Order of the moves. [day - 1] -> the day whose move it gets
  for (const Period part : {Period{1, middle}, Period{middle, days}}) {
    std::vector<std::size_t> moves;
    for (std::size_t day = part.first; day < part.last; ++day) moves.push_back(day);
    random.shuffle(moves);
    order.insert(order.end(), moves.begin(), moves.end());
  }
  std::vector<PriceSeries> result = series;
  for (std::size_t asset = 0; asset < series.size(); ++asset) {
    const PriceSeries& from = series[asset];
    PriceSeries& to = result[asset];
    to.expected_growth.clear();
    for (std::size_t day = 1; day < days; ++day) {
      const std::size_t source = order[day - 1];
      const double scale = to.close[day - 1] / from.close[source - 1];
      to.open[day] = from.open[source] * scale;
      to.high[day] = from.high[source] * scale;
      to.low[day] = from.low[source] * scale;
      to.close[day] = from.close[source] * scale;
      to.volume[day] = from.volume[source];
    }
  }
  return result;
}

}  // namespace clstm_ppo
