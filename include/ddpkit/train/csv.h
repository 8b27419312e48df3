// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ddpkit::train {

/// One record of a CSV file.
struct CsvRecord {
  std::size_t line = 0;             ///< First line of the record, from 1.
  std::vector<std::string> fields;  ///< [column], without quotes.
  /// Violation of RFC 4180: a quote without an end, text after a closing quote. Empty: none.
  std::string fault;
};

/// Reads a CSV file by RFC 4180 (commas, quotes doubled within quotes, line ends within quotes). Accepts LF and CRLF,
/// and a byte-order mark. Skips empty lines. Throws InvalidArgument if the file does not exist.
std::vector<CsvRecord> read_csv(const std::filesystem::path& path);

/// Parses CSV text.
std::vector<CsvRecord> parse_csv(std::string_view text);

/// Returns `text` as one field, quoted if necessary.
std::string csv_field(std::string_view text);

/// Parses `text` as a whole number with optional surrounding blanks. Returns an empty optional for other text.
std::optional<long long> parse_whole_number(std::string_view text);

}  // namespace ddpkit::train
