// Tier 0: the standard library only. What programs say.
#pragma once

#include <string>
#include <string_view>

namespace ddpkit::train {

/// `text` for an error message: in quotes, shortened to 40 characters, without control characters.
std::string in_quotes(std::string_view text);

/// Prints a line to stdout at once.
void print_line(const std::string& line);

}  // namespace ddpkit::train
