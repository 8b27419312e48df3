// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace har {

/// Reads a text file line by line and reports errors with the line number.
class TextFile {
 public:
  /// The name may be in any case; skips a byte-order mark. Throws ddpkit::InvalidArgument if the file cannot be read.
  explicit TextFile(const std::filesystem::path& path);

  /// Returns the next line without its end and surrounding blanks; nothing after the last. Skips empty lines.
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

/// Removes blanks at both ends.
std::string_view trimmed(std::string_view text);

/// Removes the next word from `rest` and returns it; empty at the end.
std::string_view next_word(std::string_view& rest);

/// Parses all of `text` as a finite number. Returns nothing for other text.
std::optional<float> parse_float(std::string_view text);

/// Parses all of `text` as an integer.
std::optional<int> parse_int(std::string_view text);

}  // namespace har
