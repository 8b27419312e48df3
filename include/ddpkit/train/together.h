// Tier 0: the standard library only.
#pragma once

#include <functional>
#include <string>

namespace ddpkit {
class ProcessGroup;
}

namespace ddpkit::train {

/// Calls `body` on all ranks, and returns if `body` succeeded on all. For the parts of a program that may fail on one
/// rank alone (reading files, writing them), which would leave the others waiting in their next collective.
///
/// Collective; `body` itself must not be. If `body` throws, all ranks throw the error of the lowest rank that failed:
/// that rank the same exception, the others an InvalidArgument or Error with its text. context().rank is that rank.
void run_together(const ProcessGroup& group, const std::function<void()>& body);

/// Rank `root`'s bytes, of any length, on every rank. Collective; what the others pass is ignored.
std::string broadcast_bytes(const ProcessGroup& group, std::string bytes, int root = 0);

}  // namespace ddpkit::train
