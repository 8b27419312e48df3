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
  std::string backend;  ///< "shm", "gloo", "openmpi", or "limit": the bare loop.
  int ranks = 0;
  std::uint64_t bytes = 0;
  std::string memory;       ///< "symmetric" or "private".
  double us = 0;            ///< Of one call, median.
  std::uint64_t wrong = 0;  ///< Elements with a wrong value, over all ranks.

  double algbw_GBps() const;  ///< bytes / time.
  double busbw_GBps() const;  ///< algbw times the collective's bus factor.
};

/// The first line of a CSV file.
inline constexpr std::string_view kCsvHeader = "collective,backend,ranks,bytes,memory,us,algbw_GBps,busbw_GBps";

/// A row of a CSV file, without the end of line.
std::string to_csv(const Row& row);

/// The same and the wrong elements as one more column: how the measuring processes report.
std::string to_report(const Row& row);

/// Reads such a line; nothing when it is not one.
std::optional<Row> parse_report(std::string_view line);

/// The table's head (two lines) and a row of it, without the end of line.
std::string table_header();
std::string table_row(const Row& row);

}  // namespace ddpkit::bench
