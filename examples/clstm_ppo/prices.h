// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace clstm_ppo {

/// One asset's prices, a bar a day (or hour, or month). [bar]
struct PriceSeries {
  std::string name;                 ///< The file's, without ".csv".
  std::vector<std::int64_t> times;  ///< Seconds since 1970; ascending.
  std::vector<std::string> dates;   ///< As the file has them.
  std::vector<double> open, high, low, close;
  std::vector<double> volume;
  /// Only of a generated market, whose pattern is known: expected growth of the close to the next bar. Empty elsewhere.
  /// Nothing that trades sees it.
  std::vector<double> expected_growth;

  std::size_t size() const noexcept { return times.size(); }
};

/// Reads a CSV file with the columns Date, Open, High, Low, Close and Volume, in any order; others are left alone. A
/// date is YYYY-MM-DD, with HH:MM or HH:MM:SS behind it where bars are shorter than a day.
///
/// Nothing in the file is trusted. Throws ddpkit::InvalidArgument "FILE:LINE: reason" for a missing or repeated column,
/// a row of another length, a date that is none, repeats or goes back, a price that is no number above 0, a volume that
/// is none, a high below the low, an open or close outside of them, and fewer than `least` rows.
PriceSeries read_prices(const std::filesystem::path& file, std::size_t least = 2);

/// All NAME.csv of a folder (the ending in capitals or not) in the order of their names, or those of `assets` in that
/// order. Throws ddpkit::InvalidArgument where the folder or an asset is not there.
std::vector<PriceSeries> read_price_folder(const std::filesystem::path& folder, const std::vector<std::string>& assets,
                                           std::size_t least = 2);

/// The bars whose times all series have. Throws ddpkit::InvalidArgument when fewer than `least` are left.
std::vector<PriceSeries> joined(const std::vector<PriceSeries>& series, std::size_t least = 2);

/// Writes what read_prices() reads; whole or not at all. Throws ddpkit::Error with the system's reason.
void write_prices(const std::filesystem::path& file, const PriceSeries& series);

}  // namespace clstm_ppo
