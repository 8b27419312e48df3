// Tier 0: the standard library only.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include <ddpkit/error.h>

#include "comm/shm/control.h"
#include "comm/shm/mapping.h"
#include "comm/shm/process_watch.h"

namespace ddpkit::shm {

/// Returns the error for a failure of the group.
std::exception_ptr make_error(FailureKind kind, const std::string& text, Error::Context context);

/// Creates the control memory of a group.
Mapping create_control(int world_size);

/// The ranks of a group, as one of them sees them: their counts, sleeps, failures and processes, and their memory.
///
/// The engine's mutex protects publish(), notify_sleepers() and publish_failure(). The other functions are thread-safe.
class Peers {
 public:
  /// Waits until all ranks have joined. Publishes an error before throwing it. Parameters and errors: see Engine.
  Peers(Mapping control, int rank, std::vector<int> pids, std::chrono::milliseconds timeout, std::vector<int> names);
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  int rank() const noexcept { return rank_; }
  int world_size() const noexcept { return world_size_; }
  int pid(int rank) const noexcept { return pids_[static_cast<std::size_t>(rank)]; }
  /// Returns the rank's number for messages.
  int named(int rank) const noexcept { return names_[static_cast<std::size_t>(rank)]; }
  RankBlock& block(int rank) const noexcept { return blocks_[rank]; }
  RankBlock& own() const noexcept { return blocks_[rank_]; }
  ControlHead& head() const noexcept { return head_; }
  /// Returns whether there is a core for each rank, so that a rank may spin.
  bool core_each() const noexcept { return core_each_; }

  /// kSlots of kSlotStride bytes each. [rank] Empty for a group of one rank.
  std::vector<std::byte*> staging_slots() const;
  /// The channels from each rank. [rank] Empty for a group of one rank.
  std::vector<ChannelBlock*> channels() const;
  /// Maps pages of a rank. Throws like Mapping::open(), or the failure that the rank has published.
  Mapping open(int rank, int fd, std::size_t bytes, Mapping::Populate populate) const;

  // Counts.
  bool all_reached(std::atomic<std::uint64_t> Progress::*count, std::uint64_t enough) const noexcept {
    // An atomic load makes the compiler read members again, but not these.
    const RankBlock* block = blocks_;
    const RankBlock* const end = block + world_size_;
    for (; block != end; ++block) {
      if ((block->progress.*count).load() < enough) return false;
    }
    return true;
  }
  /// Returns the smallest count of all ranks.
  std::uint64_t least(std::atomic<std::uint64_t> Progress::*count) const noexcept {
    std::uint64_t least = (own().progress.*count).load();
    for (int r = 0; r < world_size_; ++r) least = std::min(least, (block(r).progress.*count).load());
    return least;
  }
  /// Raises a count of this rank.
  void publish(std::atomic<std::uint64_t>& count, std::uint64_t value) noexcept {
    count.store(value, std::memory_order_release);
    published_ = true;
  }
  /// Wakes sleeping peers, once for all the counts published in a turn, because the barrier costs more than the stores.
  /// No barrier is needed with membarrier(2): a rank that starts to sleep then makes all others execute one.
  void notify_sleepers() noexcept;

  // Sleep. A peer publishes a count or ends its group, and then reads `sleeping`. This rank calls start_sleep(), and
  // then reads the counts and ends. In any order of the four steps, either this rank sees the change or the peer wakes
  // it.
  /// Sets `sleeping`. Returns the value to pass to sleep().
  std::uint32_t start_sleep() const noexcept;
  /// Sleeps until a wake() after start_sleep(), at most `limit`.
  void sleep(std::uint32_t wake_word, std::chrono::milliseconds limit) const noexcept;
  void end_sleep() const noexcept { own().sleeping.fetch_sub(1); }
  void wake(int rank) const noexcept;

  // Failures.
  struct Failure {
    FailureKind kind = FailureKind::kNone;
    std::string text;
    std::optional<int> failed_rank;
    std::uint64_t sequence = 0;  ///< The rank has completed the collectives before it.
  };
  /// Returns whether a rank has published a failure. Reads a cache line that nobody writes before.
  bool any_failed() const noexcept { return head_.failures.load() != 0; }
  /// Publishes this rank's failure in the collective `sequence`; only the first failure counts.
  void publish_failure(FailureKind kind, const std::string& text, std::optional<int> failed_rank,
                       std::uint64_t sequence = 0) const noexcept;
  /// Returns the failure that the rank has published, if any.
  std::optional<Failure> failure_of(int rank) const;
  /// Marks this rank as having left. It has completed the collectives before number `sequence`.
  void leave(std::uint64_t sequence) const noexcept;
  /// Returns the number of collectives that the rank had completed when it failed or left.
  std::uint64_t completed_by(int rank) const noexcept;
  /// Returns the number of ranks that have published a failure or left. It never decreases.
  int ended() const noexcept;
  /// Returns whether the rank has left or its process has ended.
  bool has_ended(int rank) const noexcept {
    return block(rank).left.load() != 0 || !watches_[static_cast<std::size_t>(rank)].alive();
  }
  /// Returns the other ranks that have ended.
  std::vector<int> lost() const;
  /// Makes a rank print its stack to stderr, unless a launcher reads the recorder and requests the stacks.
  void request_stack(int rank) const noexcept;

 private:
  void join(std::chrono::milliseconds timeout);
  void wait_for_joined(std::uint32_t step, std::chrono::milliseconds timeout,
                       std::chrono::steady_clock::time_point deadline) const;
  void throw_if_missing(int rank) const;
  void throw_failure_of(int rank) const;
  void wake_others() const noexcept;

  const int rank_;
  const int world_size_;
  const std::vector<int> pids_;   ///< [rank]
  const std::vector<int> names_;  ///< [rank]
  Mapping control_;
  ControlHead& head_;
  RankBlock* const blocks_;            ///< [rank]
  std::vector<Mapping> staging_;       ///< [rank]
  std::vector<Mapping> channels_;      ///< [rank]
  std::vector<ProcessWatch> watches_;  ///< [rank]
  bool core_each_ = false;
  bool has_membarrier_ = false;  ///< All ranks have registered for membarrier(2).
  bool published_ = false;       ///< Counts were raised, and sleeping peers have not been notified.
};

}  // namespace ddpkit::shm
