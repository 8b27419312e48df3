// Parsers of files from outside ddpkit, each in the form that a fuzzer calls.
#pragma once

#include <filesystem>
#include <span>
#include <string>

namespace ddpkit::testing {

struct FuzzTarget {
  const char* name;
  /// Reads `bytes` as a file in `folder`. Returns, or throws ddpkit::InvalidArgument. Any other result is a fault of
  /// the parser.
  void (*parse)(const std::string& bytes, const std::filesystem::path& folder);
};

std::span<const FuzzTarget> fuzz_targets();

/// Runs the target and catches the errors that it may throw.
void run_fuzz_target(const FuzzTarget& target, const std::string& bytes, const std::filesystem::path& folder);

}  // namespace ddpkit::testing
