// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "clstm_ppo/prices.h"

namespace clstm_ppo {

/// Days first .. last-1 of a market.
struct Period {
  std::size_t first = 0;
  std::size_t last = 0;

  std::size_t days() const noexcept { return last - first; }
};

/// What the market tells about an asset each day, in this order. All of it is without a unit, so that what was learnt
/// at 100 a share holds at 800.
enum Signal : std::size_t {
  kReturn,  ///< Logarithm of the close over the day before's.
  kMacd,    ///< As a share of the close.
  kRsi,     ///< 0 to 100.
  kCci,
  kAdx,  ///< 0 to 100.
  kSignals,
};

struct MarketOptions {
  int turbulence_days = 252;  ///< History that a day is compared with.
};

/// Several assets over the same days, with what is computed of them. A day is a bar, whatever its length.
class Market {
 public:
  /// `series`: joined(), at least least_days() long. The days on which an indicator is not yet defined are left out.
  explicit Market(const std::vector<PriceSeries>& series, const MarketOptions& options = {});

  /// Bars that a series must have so that `days` remain.
  static std::size_t least_days(std::size_t days);

  std::size_t days() const noexcept { return dates_.size(); }
  std::size_t assets() const noexcept { return names_.size(); }
  const std::vector<std::string>& names() const noexcept { return names_; }
  const std::string& date(std::size_t day) const { return dates_[day]; }
  double close(std::size_t day, std::size_t asset) const { return closes_[day * assets() + asset]; }
  double signal(std::size_t day, std::size_t asset, Signal signal) const {
    return signals_[(day * assets() + asset) * kSignals + signal];
  }

  /// How unusual a day's returns are: their squared Mahalanobis distance from those of the days before. 0 until there
  /// is enough history. M. Kritzman and Y. Li, "Skulls, Financial Turbulence, and Risk Management", Financial Analysts
  /// Journal 66(5), 2010.
  double turbulence(std::size_t day) const { return turbulence_[day]; }
  /// That `share` of the period's days do not exceed. Infinite when `share` is 1.
  double turbulence_quantile(const Period& period, double share) const;

  /// Whether the pattern that makes the prices is known, as it is of a generated market.
  bool has_pattern() const noexcept { return !expected_growth_.empty(); }
  /// Close of the next day over this day's, as expected by one who knows the pattern.
  double expected_growth(std::size_t day, std::size_t asset) const { return expected_growth_[day * assets() + asset]; }

  /// Bars in a year, by the dates: about 252 for trading days, 12 for months.
  double periods_per_year() const noexcept { return periods_per_year_; }

 private:
  std::vector<std::string> names_;       // [asset]
  std::vector<std::string> dates_;       // [day]
  std::vector<double> closes_;           // [day, asset]
  std::vector<double> signals_;          // [day, asset, signal]
  std::vector<double> turbulence_;       // [day]
  std::vector<double> expected_growth_;  // [day, asset]
  double periods_per_year_ = 252;
};

/// The same moves of the same days in another order, drawn by `seed` within each of two parts, divided at the share
/// `first_part`: each part ends where it ended, and the assets still move together, but there is nothing to predict.
/// Leaves out `expected_growth`, which no longer holds.
std::vector<PriceSeries> shuffled(const std::vector<PriceSeries>& series, double first_part, std::uint64_t seed);

}  // namespace clstm_ppo
