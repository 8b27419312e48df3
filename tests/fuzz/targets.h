// What reads files that ddpkit did not write, each as a fuzzer calls it.
#pragma once

#include <filesystem>
#include <span>
#include <string>

namespace ddpkit::testing {

struct FuzzTarget {
  const char* name;
  /// Reads `bytes`, as a file in `folder`. Ends, or throws ddpkit::InvalidArgument; whatever else happens is a fault of
  /// the parser.
  void (*parse)(const std::string& bytes, const std::filesystem::path& folder);
};

std::span<const FuzzTarget> fuzz_targets();

/// Runs the target; an error that it may throw is fine.
void run_fuzz_target(const FuzzTarget& target, const std::string& bytes, const std::filesystem::path& folder);

}  // namespace ddpkit::testing
