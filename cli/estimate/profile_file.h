// Tier 0: the standard library only.
#pragma once

#include <string>

#include <ddpkit/scaling/step.h>

namespace ddpkit::cli {

/// The step that a run has recorded as a timeline (Chrome trace of ddpkit::Timeline, DDPKIT_TIMELINE): rank 0's, the
/// median over its steps. The first steps, a tenth and at least three, are left out: they warm up. Of a run on several
/// ranks the waiting is taken off: backward ends with its last gradient. Throws InvalidArgument, with the file's name,
/// when it cannot be read, is no timeline, or holds fewer than five steps behind the first ones.
scaling::StepProfile read_profile(const std::string& path);

}  // namespace ddpkit::cli
