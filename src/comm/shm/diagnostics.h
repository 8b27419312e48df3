// Tier 0: the standard library only. Compares the calls of the ranks, and writes the texts of the engine's errors.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "comm/shm/mailbox.h"
#include "comm/shm/operation.h"
#include "comm/shm/peers.h"

namespace ddpkit::shm {

const char* name_of(CollectiveKind kind);

/// Throws InvalidArgument if a slot is too small for one piece per rank.
void check_pieces(CollectiveKind kind, int world_size);
/// Throws CollectiveMismatch if the ranks called different collectives, or the same with different arguments.
void compare_headers(const Peers& peers, const CollectiveHeader& own);
/// All-to-all: throws CollectiveMismatch if `rank` sends another number of elements than this rank expects. `slot`: its
/// first slot of the collective.
void compare_counts(const Peers& peers, const Operation& operation, int rank, const std::byte* slot);

/// The object of a wait.
struct Awaited {
  const Message* message = nullptr;   ///< Null: the wait is for collectives.
  const Operation* oldest = nullptr;  ///< The oldest collective in progress; null: none.
};

/// Returns the ranks that have not done what the wait needs next.
std::vector<int> missing_ranks(const Peers& peers, const Awaited& awaited);
/// Returns "has ended", or "has left the group".
const char* end_of(const Peers& peers, int rank);
/// Returns the error of a wait for a rank whose process has ended or that has left the group.
std::string lost_text(const Peers& peers, const Awaited& awaited, int lost);
std::string timeout_text(const Peers& peers, const Awaited& awaited, const std::vector<int>& missing,
                         std::chrono::milliseconds waited, std::chrono::milliseconds timeout);

}  // namespace ddpkit::shm
