// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace har {

/// A text file in memory, read line by line, that knows where it stands.
class TextFile {
 public:
  /// The name may be in capitals or not; a byte-order mark is skipped. Throws ddpkit::InvalidArgument when the file
  /// cannot be read.
  explicit TextFile(const std::filesystem::path& path);

  /// The next line without its end and surrounding blanks, empty optional after the last. Skips empty lines.
  std::optional<std::string_view> next_line();

  /// Throws ddpkit::InvalidArgument "FILE:LINE: message" for the line that next_line() last returned.
  [[noreturn]] void fail(const std::string& message) const;

  const std::filesystem::path& path() const noexcept { return path_; }
  std::size_t line() const noexcept { return line_; }

 private:
  std::filesystem::path path_;
  std::string text_;
  std::size_t position_ = 0;
  std::size_t line_ = 0;  // Number of the last line returned, from 1.
};

/// Without blanks at both ends.
std::string_view trimmed(std::string_view text);

/// Takes the next word off `rest`; empty at the end.
std::string_view next_word(std::string_view& rest);

/// All of `text` as a finite number; empty optional when it is anything else.
std::optional<float> parse_float(std::string_view text);

/// All of `text` as a whole number.
std::optional<int> parse_int(std::string_view text);

}  // namespace har
