// Tier 0: the standard library only.
#pragma once

namespace ddpkit::cli {

/// Returns the value of an environment variable, or `otherwise` if it is not set. Throws InvalidArgument if the value
/// is not a number from `low` to `high`.
int number_from_environment(const char* name, int low, int high, int otherwise);

}  // namespace ddpkit::cli
