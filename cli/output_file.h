// Tier 0: the standard library only. Files that a command writes when it has measured or drawn.
#pragma once

#include <string>

namespace ddpkit::cli {

/// Throws InvalidArgument when no file can be written there: now rather than after minutes of measuring.
void check_output(const std::string& path);

/// Replaces the file by one with this text, whole or not at all; what is no file, such as a pipe, is given the text.
/// Throws Error.
void write_output(const std::string& path, const std::string& text);

}  // namespace ddpkit::cli
