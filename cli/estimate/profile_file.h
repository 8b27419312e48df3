// Tier 0: the standard library only.
#pragma once

#include <string>

#include <ddpkit/scaling/step.h>

namespace ddpkit::cli {

/// Reads the profile of a step from a timeline (Chrome trace of ddpkit::Timeline, DDPKIT_TIMELINE): the median over
/// rank 0's steps. Skips the first tenth of the steps, at least three, as warm-up. For several ranks, subtracts the
/// waiting time: backward ends with its last gradient. Throws InvalidArgument with the file's name if the file cannot
/// be read, is not a timeline, or has fewer than five steps after warm-up.
scaling::StepProfile read_profile(const std::string& path);

}  // namespace ddpkit::cli
