// Which threads keep casts of weights within an Autocast.
#pragma once

namespace ddpkit::optim {

/// Scopes on the calling thread keep no casts from now on, and clear none. LibTorch keeps those of all threads in one
/// place, which the end of any thread's outermost scope clears: of threads that work on one step side by side, one
/// would lose its casts when another is done, and a weight that it uses twice would be cast once or twice, as it comes,
/// with another rounding of its gradient.
void keep_no_casts();

}  // namespace ddpkit::optim
