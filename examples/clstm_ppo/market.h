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

/// The signals of an asset per day, in this order. All are without a unit, so that a policy learned at a price of 100
/// also works at 800.
enum Signal : std::size_t {
  kReturn,  ///< Logarithm of the ratio of the close to the previous close.
  kMacd,    ///< As a share of the close.
  kRsi,     ///< 0 to 100.
  kCci,
  kAdx,  ///< 0 to 100.
  kSignals,
};

struct MarketOptions {
  int turbulence_days = 252;  ///< Days of history for the turbulence.
};

/// Several assets over the same days, with computed signals. A day is a bar of any length.
class Market {
 public:
  /// `series`: joined(), at least least_days() long. Skips the days on which an indicator is not yet defined.
  explicit Market(const std::vector<PriceSeries>& series, const MarketOptions& options = {});

  /// Returns the bars that a series must have so that `days` remain.
  static std::size_t least_days(std::size_t days);

  std::size_t days() const noexcept { return dates_.size(); }
  std::size_t assets() const noexcept { return names_.size(); }
  const std::vector<std::string>& names() const noexcept { return names_; }
  const std::string& date(std::size_t day) const { return dates_[day]; }
  double close(std::size_t day, std::size_t asset) const { return closes_[day * assets() + asset]; }
  double signal(std::size_t day, std::size_t asset, Signal signal) const {
    return signals_[(day * assets() + asset) * kSignals + signal];
  }

  /// Returns how unusual a day's returns are: their squared Mahalanobis distance from the returns of earlier days. 0
  /// until there is enough history. M. Kritzman and Y. Li, "Skulls, Financial Turbulence, and Risk Management",
  /// Financial Analysts Journal 66(5), 2010.
  double turbulence(std::size_t day) const { return turbulence_[day]; }
  /// Returns the turbulence that `share` of the period's days do not exceed. Infinite if `share` is 1.
  double turbulence_quantile(const Period& period, double share) const;

  /// Returns whether the expected prices are known, as in a generated market.
  bool has_pattern() const noexcept { return !expected_growth_.empty(); }
  /// Returns the expected ratio of the next day's close to this day's close, given the pattern.
  double expected_growth(std::size_t day, std::size_t asset) const { return expected_growth_[day * assets() + asset]; }

  /// Bars per year, from the dates: about 252 for trading days, 12 for months.
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

/// Returns the same moves of the same days in another order. `seed` shuffles within each of two parts, divided at the
/// share `first_part`. Each part ends at the same prices, and the assets still move together, but nothing is
/// predictable. Omits `expected_growth`, which is no longer valid.
std::vector<PriceSeries> shuffled(const std::vector<PriceSeries>& series, double first_part, std::uint64_t seed);

}  // namespace clstm_ppo
