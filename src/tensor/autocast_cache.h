// Controls which threads cache weight casts within an Autocast.
#pragma once

namespace ddpkit::optim {

/// Disables the cast cache for later scopes on the calling thread; clears nothing. LibTorch has one cache for all
/// threads, and the end of any thread's outermost scope clears it. With several threads in one step, a thread could
/// lose its casts when another thread finishes. A weight with two uses would then be cast once or twice, depending on
/// timing, and its gradient would be rounded differently.
void disable_autocast_cache();

}  // namespace ddpkit::optim
