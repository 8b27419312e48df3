// Tier 0: the standard library only. What programs say.
#pragma once

#include <string>
#include <string_view>

namespace ddpkit::train {

/// `text` for an error message: in quotes, shortened to 40 characters, without control characters.
std::string in_quotes(std::string_view text);

/// Prints a line to stdout at once. Does not throw where that is full: run_main() says so at the end.
void print_line(const std::string& line);

/// Prints a line to stderr. Where that is full or gone there is nobody to tell.
void say(const std::string& line) noexcept;

}  // namespace ddpkit::train
