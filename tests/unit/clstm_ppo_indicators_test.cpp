// Compares indicators with published figures and with direct computations of their definitions for each day.
#include <algorithm>
#include <array>
#include <cmath>

#include <ddpkit/train/random.h>

#include "clstm_ppo/indicators.h"
#include "clstm_ppo/turbulence.h"
#include "support/catch.h"

using namespace clstm_ppo;

namespace {

struct Bars {
  Series high, low, close;
};

Bars random_bars(std::size_t days, std::uint64_t seed) {
  ddpkit::train::Random random(seed);
  Bars bars;
  double close = 50;
  for (std::size_t day = 0; day < days; ++day) {
    const double open = close;
    close *= std::exp(random.normal(0.02));
    bars.close.push_back(close);
    bars.high.push_back(std::max(open, close) * (1 + std::abs(random.normal(0.01))));
    bars.low.push_back(std::min(open, close) * (1 - std::abs(random.normal(0.01))));
  }
  return bars;
}

// Returns the exponential average of all days up to `day`, computed as a weighted sum.
double exponential_average(const Series& values, std::size_t day, int period) {
  const double weight = 2.0 / (period + 1);
  double sum = std::pow(1 - weight, static_cast<double>(day)) * values[0];
  for (std::size_t i = 1; i <= day; ++i) sum += weight * std::pow(1 - weight, static_cast<double>(day - i)) * values[i];
  return sum;
}

// Returns Wilder's average of values[first .. day], computed as a weighted sum. The first `period` values have a plain
// average.
double wilder_average(const Series& values, std::size_t first, std::size_t day, int period) {
  const double keep = 1 - 1.0 / period;
  const std::size_t seeded = first + static_cast<std::size_t>(period) - 1;
  double sum = 0;
  for (std::size_t i = first; i <= seeded; ++i)
    sum += values[i] / period * std::pow(keep, static_cast<double>(day - seeded));
  for (std::size_t i = seeded + 1; i <= day; ++i)
    sum += values[i] / period * std::pow(keep, static_cast<double>(day - i));
  return sum;
}

std::size_t first_defined(const Series& values) {
  return static_cast<std::size_t>(std::find_if(values.begin(), values.end(), [](double v) { return !std::isnan(v); }) -
                                  values.begin());
}

}  // namespace

TEST_CASE("RSI gives the figures of a published example", "[clstm_ppo]") {
  // StockCharts.com, ChartSchool, "Relative Strength Index", of QQQQ from 2009-12-14.
  const Series close = {44.3389, 44.0902, 44.1497, 43.6124, 44.3278, 44.8264, 45.0955, 45.4245, 45.8433,
                        46.0826, 45.8931, 46.0328, 45.6140, 46.2820, 46.2820, 46.0028, 46.0328, 46.4116,
                        46.2222, 45.6439, 46.2122, 46.2521, 45.7137, 46.4515, 45.7835, 45.3548, 44.0288,
                        44.1783, 44.2181, 44.5672, 43.4205, 42.6628, 43.1314};
  const Series published = {70.53, 66.32, 66.55, 69.41, 66.36, 57.97, 62.93, 63.26, 56.06, 62.38,
                            54.71, 50.42, 39.99, 41.46, 41.87, 45.46, 37.30, 33.08, 37.77};
  const Series result = rsi(close);
  REQUIRE(first_defined(result) == 14);
  for (std::size_t i = 0; i < published.size(); ++i) CHECK(result[14 + i] == Approx(published[i]).margin(0.006));
}

TEST_CASE("MACD, RSI, CCI and ADX match their definitions", "[clstm_ppo]") {
  const Bars bars = random_bars(120, 3);
  const std::size_t days = bars.close.size();
  Series gains(days, 0), losses(days, 0), rise(days, 0), fall(days, 0), range(days, 0), index(days, 0);
  for (std::size_t day = 1; day < days; ++day) {
    const double change = bars.close[day] - bars.close[day - 1];
    gains[day] = change > 0 ? change : 0;
    losses[day] = change < 0 ? -change : 0;
    const double up = bars.high[day] - bars.high[day - 1], down = bars.low[day - 1] - bars.low[day];
    rise[day] = up > down && up > 0 ? up : 0;
    fall[day] = down > up && down > 0 ? down : 0;
    range[day] = std::max(bars.high[day], bars.close[day - 1]) - std::min(bars.low[day], bars.close[day - 1]);
  }
  for (std::size_t day = 14; day < days; ++day) {
    const double average_range = wilder_average(range, 1, day, 14);
    const double plus = 100 * wilder_average(rise, 1, day, 14) / average_range,
                 minus = 100 * wilder_average(fall, 1, day, 14) / average_range;
    index[day] = 100 * std::abs(plus - minus) / (plus + minus);
  }
  const Series averages = macd(bars.close), strength = rsi(bars.close), channel = cci(bars.high, bars.low, bars.close),
               trend = adx(bars.high, bars.low, bars.close);
  CHECK(first_defined(averages) == 25);
  CHECK(first_defined(strength) == 14);
  CHECK(first_defined(channel) == 19);
  CHECK(first_defined(trend) == 27);
  CHECK(kFirstDayOfAll == 27);
  for (std::size_t day = 27; day < days; ++day) {
    CAPTURE(day);
    CHECK(averages[day] ==
          Approx(exponential_average(bars.close, day, 12) - exponential_average(bars.close, day, 26)).margin(1e-9));
    const double relative = wilder_average(gains, 1, day, 14) / wilder_average(losses, 1, day, 14);
    CHECK(strength[day] == Approx(100 - 100 / (1 + relative)));
    std::array<double, 20> typical{};
    double mean = 0, deviation = 0;
    for (std::size_t i = 0; i < 20; ++i) {
      const std::size_t at = day - 19 + i;
      typical[i] = (bars.high[at] + bars.low[at] + bars.close[at]) / 3;
      mean += typical[i] / 20;
    }
    for (const double value : typical) deviation += std::abs(value - mean) / 20;
    CHECK(channel[day] == Approx((typical[19] - mean) / (0.015 * deviation)).margin(1e-9));
    CHECK(trend[day] == Approx(wilder_average(index, 14, day, 14)));
  }
}

TEST_CASE("indicators see nothing of later days", "[clstm_ppo]") {
  const Bars all = random_bars(80, 5);
  for (const std::size_t days : {28UL, 50UL, 79UL}) {
    const auto cut = [&](Series series) {
      series.resize(days);
      return series;
    };
    const Bars some{cut(all.high), cut(all.low), cut(all.close)};
    CHECK(macd(some.close).back() == macd(all.close)[days - 1]);
    CHECK(rsi(some.close).back() == rsi(all.close)[days - 1]);
    CHECK(cci(some.high, some.low, some.close).back() == cci(all.high, all.low, all.close)[days - 1]);
    CHECK(adx(some.high, some.low, some.close).back() == adx(all.high, all.low, all.close)[days - 1]);
  }
}

TEST_CASE("indicators of a constant or rising market are finite", "[clstm_ppo]") {
  const Series flat(40, 7.3);
  CHECK(macd(flat).back() == Approx(0).margin(1e-12));
  CHECK(rsi(flat).back() == 50);
  CHECK(cci(flat, flat, flat).back() == 0);
  CHECK(adx(flat, flat, flat).back() == 0);
  Series rising;
  for (int day = 0; day < 40; ++day) rising.push_back(10 + day);
  CHECK(rsi(rising).back() == 100);
  CHECK(adx(rising, rising, rising).back() == Approx(100));
  // Twenty values with equal increments: the last is 9.5 above their mean; their mean deviation is 5.
  CHECK(cci(rising, rising, rising).back() == Approx(9.5 / (0.015 * 5)));
  CHECK(macd({}).empty());
  CHECK(rsi({1.0, 2.0}).size() == 2);
  CHECK(std::isnan(adx({1, 2}, {1, 2}, {1, 2})[1]));
  CHECK(std::isnan(cci({1, 2}, {1, 2}, {1, 2})[1]));
}

TEST_CASE("turbulence is the squared Mahalanobis distance from the days before", "[clstm_ppo]") {
  // By hand: four days with mean (0, 0), variances 4/3 and 16/3 and no covariance.
  const std::vector<std::vector<double>> returns = {{1, 2}, {-1, 2}, {1, -2}, {-1, -2}, {2, 4}, {0, 0}};
  const std::vector<double> result = turbulence(returns, 4);
  CHECK(std::vector<double>(result.begin(), result.begin() + 4) == std::vector<double>(4, 0.0));
  CHECK(result[4] == Approx(4 / (4.0 / 3) + 16 / (16.0 / 3)).epsilon(1e-5));
  // The covariance of equal assets has no inverse.
  const std::vector<double> alike = turbulence({{1, 1}, {-1, -1}, {2, 2}, {-2, -2}, {1, 1}}, 4);
  CHECK(alike[4] == Approx(1 / (10.0 / 3)).epsilon(1e-3));
}
