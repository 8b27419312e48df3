// Tier 0: the standard library only. Output files of commands.
#pragma once

#include <string>

namespace ddpkit::cli {

/// Throws InvalidArgument if the file cannot be written. Checks before the measurements, which take minutes.
void check_output(const std::string& path);

/// Replaces the file atomically. Writes directly to anything that is not a regular file, such as a pipe. Throws Error.
void write_output(const std::string& path, const std::string& text);

}  // namespace ddpkit::cli
