// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace ddpkit::bench {

/// One measurement.
struct Row {
  std::string collective;
  std::string backend;  ///< As --backend.
  int ranks = 0;
  std::uint64_t bytes = 0;
  std::string memory;       ///< "symmetric" or "private".
  double us = 0;            ///< Median time of one call.
  std::uint64_t wrong = 0;  ///< Wrong elements, over all ranks.

  double algbw_GBps() const;  ///< bytes / time.
  double busbw_GBps() const;  ///< algbw times the collective's bus factor.
};

/// The first line of a CSV file.
inline constexpr std::string_view kCsvHeader = "collective,backend,ranks,bytes,memory,us,algbw_GBps,busbw_GBps";

/// Returns a row of a CSV file, without the line end.
std::string to_csv(const Row& row);

/// Returns to_csv() with one more column, the wrong elements. The measuring processes print this format.
std::string to_report(const Row& row);

/// Parses a line of to_report(). Empty if the line is not in this format.
std::optional<Row> parse_report(std::string_view line);

/// Return the header (two lines) and a row of the table, without the line end.
std::string table_header();
std::string table_row(const Row& row);

}  // namespace ddpkit::bench
