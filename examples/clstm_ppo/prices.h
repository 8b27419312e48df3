// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace clstm_ppo {

/// The prices of one asset, one bar per day (or hour, or month). [bar]
struct PriceSeries {
  std::string name;                 ///< The file name without ".csv".
  std::vector<std::int64_t> times;  ///< Seconds since 1970; ascending.
  std::vector<std::string> dates;   ///< As written in the file.
  std::vector<double> open, high, low, close;
  std::vector<double> volume;
  /// Expected growth of the close to the next bar. Only in a generated market; empty otherwise. Policies do not see it.
  std::vector<double> expected_growth;

  std::size_t size() const noexcept { return times.size(); }
};

/// Reads a CSV file with the columns Date, Open, High, Low, Close and Volume, in any order. Ignores other columns. A
/// date is YYYY-MM-DD, followed by HH:MM or HH:MM:SS if bars are shorter than a day.
///
/// Validates all input. Throws ddpkit::InvalidArgument "FILE:LINE: reason" for:
/// - a missing or repeated column, or a row of another length
/// - an invalid date, or a date that is not after the previous date
/// - a price that is not a number above 0, or an invalid volume
/// - a high below the low, or an open or close outside of them
/// - fewer than `least` rows
PriceSeries read_prices(const std::filesystem::path& file, std::size_t least = 2);

/// Reads all NAME.csv of a folder (the extension in any case) in the order of their names, or the files of `assets` in
/// that order. Throws ddpkit::InvalidArgument if the folder or an asset does not exist.
std::vector<PriceSeries> read_price_folder(const std::filesystem::path& folder, const std::vector<std::string>& assets,
                                           std::size_t least = 2);

/// Returns the bars whose times all series have. Throws ddpkit::InvalidArgument if fewer than `least` remain.
std::vector<PriceSeries> joined(const std::vector<PriceSeries>& series, std::size_t least = 2);

/// Writes a file for read_prices(), atomically. Throws ddpkit::Error with the system's reason.
void write_prices(const std::filesystem::path& file, const PriceSeries& series);

}  // namespace clstm_ppo
