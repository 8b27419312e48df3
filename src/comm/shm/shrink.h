// Tier 0: the standard library only.
#pragma once

#include <chrono>
#include <functional>
#include <vector>

#include "comm/shm/mapping.h"
#include "comm/shm/peers.h"

namespace ddpkit::shm {

/// The group of the ranks that remain after the loss of a rank.
struct SmallerGroup {
  Mapping control;
  int rank = -1;             ///< This rank in the smaller group.
  std::vector<int> members;  ///< Numbers in the former group. [rank]
  std::vector<int> pids;     ///< [rank]
  std::vector<int> names;    ///< For messages. [rank]
};

/// Calls `join`, which creates the Peers of the smaller group, until all ranks that remain have joined it. The lowest
/// of them offers its control memory to the others. If a rank ends meanwhile, `join` throws on all of them, because
/// Peers lets either all ranks join or none, and the lowest of those that still remain makes the next offer. Errors:
/// see Engine::shrink().
void shrink(const Peers& peers, int min_ranks, std::chrono::milliseconds timeout,
            const std::function<void(SmallerGroup, std::chrono::milliseconds timeout)>& join);

}  // namespace ddpkit::shm
