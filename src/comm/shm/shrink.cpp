#include "comm/shm/shrink.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/timeout.h"

namespace ddpkit::shm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Returns the ranks that lost another one and still run. A rank with another failure ends.
std::vector<int> remaining(const Peers& peers) {
  std::vector<int> ranks;
  for (int r = 0; r < peers.world_size(); ++r) {
    const bool lost_a_rank = peers.block(r).failure.load() == static_cast<std::uint32_t>(FailureKind::kPeerLost);
    if (r == peers.rank() || (lost_a_rank && !peers.has_ended(r))) ranks.push_back(r);
  }
  return ranks;
}

[[noreturn]] void throw_late(const Peers& peers, int rank, const char* text) {
  throw Timeout(fmt::format("shrink: rank {} timed out: rank {} (pid {}) {} after the loss of a rank",
                            peers.named(peers.rank()), peers.named(rank), peers.pid(rank), text),
                {.rank = peers.named(rank), .call = "shrink"});
}

/// The ranks have waited for each other; see Engine::drain(). A rank that still runs and does not know of the loss
/// would later continue as a second group.
void require_all_know(const Peers& peers) {
  for (int r = 0; r < peers.world_size(); ++r) {
    if (r != peers.rank() && !peers.has_ended(r) && peers.block(r).failure.load() == 0)
      throw_late(peers, r, "made no call");
  }
}

/// Creates the control memory of a group of `members` and offers it to them.
Mapping offer(const Peers& peers, const std::vector<int>& members) {
  Mapping control = create_control(static_cast<int>(members.size()));
  for (std::size_t i = 0; i < members.size(); ++i) rank_blocks(control.data())[i].previous = members[i];
  const GroupOffer last = peers.own().offer.load();
  peers.own().offer.store({.number = static_cast<std::uint16_t>(last.number + 1),
                           .world_size = static_cast<std::uint16_t>(members.size()),
                           .fd = control.descriptor()});
  return control;
}

/// Waits for an offer of `leader` after number `seen`. Returns an empty mapping if the leader ends before.
Mapping accept(const Peers& peers, int leader, std::uint16_t& seen, Clock::time_point deadline,
               std::vector<int>& members) {
  GroupOffer theirs;
  const bool came = poll_until(deadline, [&] {
    theirs = peers.block(leader).offer.load();
    return theirs.number != seen || peers.has_ended(leader);
  });
  if (!came) throw_late(peers, leader, "did not call shrink()");
  if (theirs.number == seen) return {};
  seen = theirs.number;
  Mapping control = peers.open(leader, theirs.fd, control_bytes(theirs.world_size), Mapping::Populate::kEager);
  members.clear();
  for (int r = 0; r < theirs.world_size; ++r) members.push_back(rank_blocks(control.data())[r].previous);
  return control;
}

}  // namespace

void shrink(const Peers& peers, int min_ranks, milliseconds timeout,
            const std::function<void(SmallerGroup, milliseconds)>& join) {
  const auto deadline = Clock::now() + timeout;
  require_all_know(peers);
  std::vector<std::uint16_t> seen(static_cast<std::size_t>(peers.world_size()), 0);  // [rank]
  for (;;) {
    std::vector<int> members = remaining(peers);
    if (static_cast<int>(members.size()) < min_ranks)
      throw PeerLost(fmt::format("shrink: {} of {} ranks remain, and at least {} are needed", members.size(),
                                 peers.world_size(), min_ranks),
                     {.call = "shrink"});
    const int leader = members.front();
    try {
      Mapping control = leader == peers.rank()
                            ? offer(peers, members)
                            : accept(peers, leader, seen[static_cast<std::size_t>(leader)], deadline, members);
      const auto own = std::find(members.begin(), members.end(), peers.rank());
      if (control.data() == nullptr || own == members.end()) continue;
      SmallerGroup group{.control = std::move(control),
                         .rank = static_cast<int>(own - members.begin()),
                         .members = members,
                         .pids = {},
                         .names = {}};
      for (const int r : members) {
        group.pids.push_back(peers.pid(r));
        group.names.push_back(peers.named(r));
      }
      return join(std::move(group), time_until(deadline));
    } catch (const PeerLost&) {
      // Another rank ended.
    } catch (const Error&) {
      if (remaining(peers) == members) throw;
    }
  }
}

}  // namespace ddpkit::shm
