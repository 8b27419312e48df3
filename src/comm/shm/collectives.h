// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "comm/shm/operation.h"
#include "comm/shm/peers.h"
#include "comm/shm/segments.h"
#include "comm/shm/transfers.h"
#include "comm/trace/event_ring.h"

namespace ddpkit::shm {

/// The collectives of one rank that are in progress, in the order that all ranks share.
///
/// Each collective is split into tickets (chunks). A ticket has three steps on every rank, in order:
///   arrive   this rank's data is readable by the others (in its staging slot, or in symmetric memory in place),
///   reduce   for reductions: this rank reduces its slice of the chunk for all ranks,
///   finish   the result is in this rank's output.
/// A rank may arrive at a ticket while others finish earlier ones, as far as its staging slots permit.
///
/// The engine holds its mutex during each call. No function blocks.
class Collectives {
 public:
  /// `due` receives the callbacks and deleters of complete collectives. `group_number`: for the ring of events.
  Collectives(Peers& peers, const Segments& segments, std::vector<Due>& due, std::uint32_t group_number);
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;

  /// Returns the oldest collective in progress; null: none.
  const Operation* oldest() const noexcept { return at(first_sequence_); }
  /// Returns the number of the next collective.
  std::uint64_t next_sequence() const noexcept { return next_sequence_; }
  /// Returns a new operation for post(). Throws InvalidArgument if the group has too many ranks for it.
  OperationHandle prepare(CollectiveArgs&& args);
  /// Returns whether a header is free for the next collective. It is the header of the collective kMaxOutstanding
  /// before, so all ranks must have read it.
  bool can_post() noexcept;
  /// Adds a collective. Requires can_post(). In a group of one rank it is then complete.
  void post(const OperationHandle& operation);
  /// Advances all collectives as far as the other ranks allow. Returns whether one advanced. Throws CollectiveMismatch.
  bool progress();
  /// Completes the collectives before number `end` that another rank has completed, and no other from now on. Requires
  /// that no other rank makes progress.
  void drain(std::uint64_t end);

 private:
  /// Returns null if it is not in progress, as always in a group of one rank.
  Operation* at(std::uint64_t sequence) const noexcept {
    const std::uint64_t index = sequence - first_sequence_ + finished_;
    return index < operations_.size() ? operations_[index].get() : nullptr;
  }
  void run_alone(const OperationHandle& operation);
  bool match();
  bool all_made(const Operation& operation) const;
  void resolve();
  bool slot_is_free(std::uint64_t ticket) noexcept;
  bool all_arrived(const Operation& operation, std::uint64_t ticket) const noexcept;
  void announce(const Operation& operation, std::uint64_t ticket) noexcept;
  bool arrive();
  bool reduce();
  bool finish();

  Peers& peers_;
  Progress& own_;  ///< This rank's counts.
  const Segments& segments_;
  std::vector<Due>& due_;
  EventRing& ring_ = EventRing::of_process();
  const std::uint32_t group_number_;
  Staging staging_;
  std::uint64_t next_sequence_ = 0;
  /// Collectives in progress, oldest first, and the sequence number of the first.
  std::vector<OperationHandle> operations_;
  std::size_t finished_ = 0;  ///< Number of handles at the front of operations_ that are null. A deque would allocate.
  std::uint64_t first_sequence_ = 0;
  std::uint64_t resolved_ = 0;     ///< Number of collectives whose path and tickets are known.
  std::uint64_t next_ticket_ = 0;  ///< First ticket of the next collective to resolve.
  // The collectives of this rank's next ticket to arrive at and to reduce.
  std::uint64_t arrive_sequence_ = 0;
  std::uint64_t reduce_sequence_ = 0;
  // Smallest counts of all ranks, when last read: reading a count that its owner is raising slows both.
  std::uint64_t least_matched_ = 0;
  std::uint64_t least_finished_ = 0;
  std::uint64_t end_ = std::numeric_limits<std::uint64_t>::max();  ///< See drain().
  /// Finished, for reuse when the caller has released them: allocation would slow down small collectives.
  std::vector<OperationHandle> spare_;
};

}  // namespace ddpkit::shm
