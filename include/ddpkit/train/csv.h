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
  std::size_t line = 0;             ///< On which it begins, from 1.
  std::vector<std::string> fields;  ///< [column], without quotes.
  /// What RFC 4180 does not allow in it: a quote that is never closed, text behind a closing quote. Empty: nothing.
  std::string fault;
};

/// Reads a CSV file by RFC 4180 (commas, quotes doubled within quotes, line ends within quotes), with LF or CRLF, with
/// or without a byte-order mark. Empty lines are left out. Throws InvalidArgument when there is no such file.
std::vector<CsvRecord> read_csv(const std::filesystem::path& path);

/// The same of a text.
std::vector<CsvRecord> parse_csv(std::string_view text);

/// `text` as one field: in quotes where it needs them.
std::string csv_field(std::string_view text);

/// All of `text` as a whole number, blanks around it allowed; empty optional when it is anything else.
std::optional<long long> parse_whole_number(std::string_view text);

}  // namespace ddpkit::train
