#include "clstm_ppo/generate.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numbers>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/train/random.h>

#include "new_folder.h"

namespace clstm_ppo {
namespace {

// Returns a day (Monday to Friday), counted from 2000-01-03.
std::chrono::sys_days business_day(int number) {
  using namespace std::chrono;
  return sys_days(year(2000) / 1 / 3) + days(number / 5 * 7 + number % 5);
}

}  // namespace

std::vector<PriceSeries> generate_prices(const GenerateOptions& options) {
  std::vector<PriceSeries> all;
  ddpkit::train::Random random(options.seed);
  for (int asset = 0; asset < options.assets; ++asset) {
    PriceSeries& one = all.emplace_back();
    one.name = fmt::format("PLANTED{}", asset + 1);
    double phase = random.angle(), close = 100;
    for (int day = 0; day < options.days; ++day) {
      const std::chrono::year_month_day date{business_day(day)};
      one.times.push_back(std::int64_t{business_day(day).time_since_epoch().count()} * 86400);
      one.dates.push_back(fmt::format("{:04}-{:02}-{:02}", static_cast<int>(date.year()),
                                      static_cast<unsigned>(date.month()), static_cast<unsigned>(date.day())));
      const double open = close;
      if (day > 0) close *= std::exp(options.swing * std::cos(phase) + random.normal(options.noise));
      phase += 2 * std::numbers::pi / options.period + random.normal(options.wander);
      one.open.push_back(open);
      one.close.push_back(close);
      one.high.push_back(std::max(open, close) * std::exp(std::abs(random.normal(options.noise / 2))));
      one.low.push_back(std::min(open, close) * std::exp(-std::abs(random.normal(options.noise / 2))));
      one.volume.push_back(std::round(random.uniform(1e6, 2e6)));
      // The mean of a log-normal move.
      one.expected_growth.push_back(std::exp(options.swing * std::cos(phase) + options.noise * options.noise / 2));
    }
  }
  return all;
}

void generate(const std::filesystem::path& folder, const GenerateOptions& options) {
  write_new_folder(folder, [&](const std::filesystem::path& path) {
    for (const PriceSeries& one : generate_prices(options)) write_prices(path / (one.name + ".csv"), one);
  });
}

}  // namespace clstm_ppo
