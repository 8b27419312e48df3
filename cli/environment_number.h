// Tier 0: the standard library only.
#pragma once

namespace ddpkit::cli {

/// Of an environment variable, `otherwise` when it is not set. Throws InvalidArgument, also for what is outside of the
/// bounds.
int number_from_environment(const char* name, int low, int high, int otherwise);

}  // namespace ddpkit::cli
