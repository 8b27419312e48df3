// Tier 0: the standard library only.
#pragma once

#include <functional>
#include <string>

namespace ddpkit {
class ProcessGroup;
}

namespace ddpkit::train {

/// Calls `body` on all ranks, and returns if `body` succeeded on all. Use it for code that may fail on one rank only
/// (reading and writing files); otherwise the other ranks would wait in their next collective.
///
/// Collective; `body` must not call collectives. If `body` throws, all ranks throw the error of the lowest rank that
/// failed: that rank the same exception, the others an InvalidArgument or Error with its text. context().rank is that
/// rank.
void run_together(const ProcessGroup& group, const std::function<void()>& body);

/// Broadcasts bytes of any length from rank `root` and returns them. Collective; the other ranks' `bytes` are ignored.
std::string broadcast_bytes(const ProcessGroup& group, std::string bytes, int root = 0);

}  // namespace ddpkit::train
