// Compares the trading environment and portfolio metrics with results computed by hand.
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>

#include <fmt/format.h>

#include <ddpkit/train/random.h>

#include "clstm_ppo/environment.h"
#include "clstm_ppo/generate.h"
#include "clstm_ppo/indicators.h"
#include "clstm_ppo/performance.h"
#include "support/catch.h"

using namespace clstm_ppo;

namespace {

// `closes`: [asset][day], of the days after the warm-up.
Market market_of(const std::vector<std::vector<double>>& closes, const MarketOptions& options = {}) {
  std::vector<PriceSeries> all;
  for (const auto& kept : closes) {
    PriceSeries& one = all.emplace_back();
    one.name = fmt::format("A{}", all.size());
    std::vector<double> close(kFirstDayOfAll, kept.front());
    // Prices must change, or the indicators are undefined.
    for (std::size_t day = 0; day < close.size(); ++day) close[day] *= 1 + 0.01 * std::sin(static_cast<double>(day));
    close.insert(close.end(), kept.begin(), kept.end());
    for (std::size_t day = 0; day < close.size(); ++day) {
      one.times.push_back(static_cast<std::int64_t>(day) * 86400);
      one.dates.push_back(fmt::format("{}", day));
    }
    one.open = one.high = one.low = one.close = close;
    one.volume.assign(close.size(), 1);
  }
  return Market(all, options);
}

double step(TradingEnvironment& environment, std::vector<float> actions) { return environment.step(actions); }

}  // namespace

TEST_CASE("trades move money and shares, and cost their fees", "[clstm_ppo]") {
  const Market market = market_of({{10, 12, 12, 9}, {100, 100, 110, 110}});
  TradingEnvironment environment(market, {.initial_cash = 1000, .hmax = 20, .cost = 0.01});
  // Buys 10 shares at 10 and 2 at 100 for 300; costs are 3.
  CHECK(step(environment, {0.5F, 0.1F}) == Approx((1000 - 3 + 10 * 2) / 1000.0 - 1));
  CHECK(environment.cash() == Approx(697));
  CHECK(environment.holding(0) == Approx(10));
  CHECK(environment.holding(1) == Approx(2));
  // The environment sells only existing shares: all 10 at 12. It clips actions to 1.
  CHECK(step(environment, {-7, 0}) == Approx((697 + 120 - 1.2 + 220) / 1017 - 1));
  CHECK(environment.holding(0) == 0);
  CHECK(environment.costs() == Approx(3 + 1.2));
  // The actions ask for 20 at 12 and 20 at 110, 2464.4 with costs; the cash is 815.8. Both orders shrink by one factor.
  step(environment, {1, 1});
  const double factor = 815.8 / (2440 * 1.01);
  CHECK(environment.cash() == Approx(0).margin(1e-9));
  CHECK(environment.holding(0) == Approx(20 * factor));
  CHECK(environment.holding(1) == Approx(2 + 20 * factor));
  environment.reset(1);
  CHECK(environment.value() == 1000);
  CHECK(environment.costs() == 0);
}

TEST_CASE("without hmax one step turns the whole portfolio over, in either direction", "[clstm_ppo]") {
  const Market market = market_of({{10, 20, 20, 20}, {5, 5, 5, 5}});
  TradingEnvironment environment(market, {.initial_cash = 1000, .cost = 0});
  step(environment, {1, 0});
  CHECK(environment.value() == Approx(2000));
  // Sales pay for purchases of the same day.
  step(environment, {-1, 1});
  CHECK(environment.holding(0) == Approx(0));
  CHECK(environment.holding(1) == Approx(400));
  CHECK(environment.value() == Approx(2000));
}

TEST_CASE("the state describes prices and holdings without units", "[clstm_ppo]") {
  const std::vector<double> a = {10, 12, 12, 9}, b = {100, 100, 110, 110};
  std::array<float, 13> state{}, cash{}, other{};
  REQUIRE(TradingEnvironment::state_size(2) == 13);
  const Market market = market_of({a, b});
  TradingEnvironment environment(market, {.initial_cash = 1000, .hmax = 20, .cost = 0});
  TradingEnvironment::cash_state(market, 0, cash);
  environment.state(state);
  CHECK(state == cash);
  CHECK(state[0] == 1);
  step(environment, {0.5F, 0.1F});
  environment.state(state);
  CHECK(state[0] == Approx(700 / 1020.0));
  CHECK(state[1] == Approx(120 / 1020.0));
  CHECK(state[2] == Approx(200 / 1020.0));
  CHECK(state[3] == Approx(std::log(1.2)));
  CHECK(state[4] == 0);
  CHECK(state[7] == Approx(market.signal(1, 0, kRsi)));
  CHECK(state[12] == Approx(market.signal(1, 1, kAdx)));
  // The same at ten times the prices and the money.
  std::vector<double> expensive_a = a, expensive_b = b;
  for (double& price : expensive_a) price *= 10;
  for (double& price : expensive_b) price *= 10;
  const Market expensive = market_of({expensive_a, expensive_b});
  TradingEnvironment rich(expensive, {.initial_cash = 10000, .hmax = 20, .cost = 0});
  step(rich, {0.5F, 0.1F});
  rich.state(other);
  for (std::size_t i = 0; i < state.size(); ++i) CHECK(other[i] == Approx(state[i]).margin(1e-5));
}

TEST_CASE("a turbulent day sells everything and buys nothing", "[clstm_ppo]") {
  ddpkit::train::Random random(1);
  std::vector<double> closes = {100};
  for (int day = 1; day < 60; ++day) closes.push_back(closes.back() * std::exp(random.normal(0.01)));
  closes.push_back(closes.back() * 0.8);
  closes.push_back(closes.back());
  const Market market = market_of({closes}, {.turbulence_days = 30});
  const double threshold = market.turbulence_quantile({0, 59}, 0.99);
  CHECK(market.turbulence(60) > 10 * threshold);
  CHECK(market.turbulence_quantile({0, 59}, 1) == std::numeric_limits<double>::infinity());
  TradingEnvironment environment(market, {.initial_cash = 1000, .cost = 0, .turbulence_threshold = 10 * threshold});
  environment.reset(59);
  step(environment, {1});
  CHECK(environment.value() == Approx(800));
  step(environment, {1});
  CHECK(environment.holding(0) == 0);
  CHECK(environment.cash() == Approx(800));
}

TEST_CASE("return, Sharpe ratio and drawdown match their definitions", "[clstm_ppo]") {
  const Performance performance = performance_of({100, 110, 99, 118.8}, 252);
  CHECK(performance.total_return == Approx(0.188));
  CHECK(performance.max_drawdown == Approx(0.1));
  // Returns 0.1, -0.1, 0.2: mean 0.2 / 3, variance (0.01 + 0.01 + 0.04 - 3 * mean^2) / 2.
  const double mean = 0.2 / 3, deviation = std::sqrt((0.06 - 3 * mean * mean) / 2);
  CHECK(performance.sharpe == Approx(mean / deviation * std::sqrt(252.0)));
  CHECK(performance_of({5, 5, 5}, 252).sharpe == 0);
  CHECK(performance_of({5}, 252).total_return == 0);
  const Market market = market_of({{10, 12, 15}, {100, 90, 100}});
  const auto values = buy_and_hold(market, {0, 3}, 1010, 0.01);
  CHECK(values[0] == 1010);
  CHECK(values[1] == Approx(500 * 1.2 + 500 * 0.9));
  CHECK(values[2] == Approx(500 * 1.5 + 500));
}

TEST_CASE("the best that knows the pattern is the best of all sequences of trades", "[clstm_ppo]") {
  auto series = generate_prices({.assets = 2, .days = 27 + 8, .swing = 0.02, .period = 5, .noise = 0, .seed = 3});
  const Market market(series);
  const Period period{0, market.days()};
  const double cost = 0.004;
  // Without noise the expected growth is the real growth: try all 3^7 sequences of positions.
  double best = 0;
  const std::function<void(std::size_t, std::size_t, double)> go = [&](std::size_t day, std::size_t place,
                                                                       double value) {
    if (day + 1 == market.days()) {
      best = std::max(best, value);
      return;
    }
    for (std::size_t to = 0; to < 3; ++to) {
      double next = value;
      if (to != place) next *= (place == 0 ? 1 : 1 - cost) / (to == 0 ? 1 : 1 + cost);
      if (to > 0) next *= market.close(day + 1, to - 1) / market.close(day, to - 1);
      go(day + 1, to, next);
    }
  };
  go(0, 0, 1);
  CHECK(best > 1.02);
  CHECK(best_with_pattern(market, period, 1, cost).back() == Approx(best));
  // No sequence of actions earns more in the environment.
  ddpkit::train::Random random(1);
  for (int attempt = 0; attempt < 2000; ++attempt) {
    TradingEnvironment environment(market, {.initial_cash = 1, .cost = cost});
    while (environment.day() + 1 < market.days())
      step(environment, {static_cast<float>(random.uniform(-1, 1)), static_cast<float>(random.uniform(-1, 1))});
    CHECK(environment.value() <= best + 1e-9);
  }
}
