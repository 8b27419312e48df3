// Tier 0: the standard library only. Text output of programs.
#pragma once

#include <string>
#include <string_view>

namespace ddpkit::train {

/// Formats `text` for an error message: in quotes, shortened to 40 characters, without control characters.
std::string in_quotes(std::string_view text);

/// Prints a line to stdout and flushes. Does not throw if stdout is full: run_main() reports it at the end.
void print_line(const std::string& line);

/// Prints a line to stderr. Ignores errors.
void log_line(const std::string& line) noexcept;

}  // namespace ddpkit::train
