// Tier 0: the standard library only.
#pragma once

#include <functional>
#include <string>

namespace ddpkit {
class ProcessGroup;
}

namespace ddpkit::train {

/// Runs `body` on every rank and goes on only when it succeeded on all: for the parts of a program that may fail on one
/// rank alone (reading files, writing them), which would leave the others waiting in their next collective.
///
/// Collective; `body` itself must not be. When it throws anywhere, every rank throws the message of the lowest rank
/// that failed, as an InvalidArgument where it was one and as an Error otherwise; context().rank is that rank.
void run_together(const ProcessGroup& group, const std::function<void()>& body);

/// Rank `root`'s bytes, of any length, on every rank. Collective; what the others pass is ignored.
std::string broadcast_bytes(const ProcessGroup& group, std::string bytes, int root = 0);

}  // namespace ddpkit::train
