// Tier 0: the standard library only.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "comm/shm/collectives.h"
#include "comm/shm/diagnostics.h"
#include "comm/shm/mailbox.h"
#include "comm/shm/mapping.h"
#include "comm/shm/operation.h"
#include "comm/shm/peers.h"
#include "comm/shm/segments.h"
#include "comm/trace/event_ring.h"

namespace ddpkit::shm {

/// The collectives of one rank in one group of processes that share memory.
///
/// The engine has no progress thread. Each post() and each iteration of a wait() advances all collectives in progress
/// as far as the other ranks allow, without blocking. So with one core per rank, the training loop loses no cycles to a
/// thread.
///
/// Errors are final: the first error ends the group, is reported to the other ranks, and is thrown by every later call.
///
/// A wait in one group also advances the other groups of the process.
///
/// `on_finish` is called, and `keep_alive` released, without holding a lock, on the thread that made the progress.
///
/// Thread-safe, but the order of collectives must be the same on all ranks.
class Engine {
 public:
  /// All ranks map `control`; `pids` are their processes. [rank] Returns when all have joined. Throws RendezvousError
  /// if a rank does not join in time, PeerLost if one ends or aborts before. `names`: the
  /// numbers of the ranks in errors, if the group is a part of a larger one. [rank]
  Engine(Mapping control, int rank, std::vector<int> pids, std::chrono::milliseconds timeout,
         std::vector<int> names = {});
  /// Marks this rank as having left. Does not wait.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int rank() const noexcept { return peers_.rank(); }
  int world_size() const noexcept { return peers_.world_size(); }
  /// Returns this rank's number in messages.
  int name() const noexcept { return peers_.named(rank()); }
  /// Returns false in a child made by fork().
  bool is_of_this_process() const noexcept;

  /// From now on, the loss of a rank lets the others complete the same collectives, also those that only some of them
  /// had completed, before they throw PeerLost. Then shrink() may follow. Call it on all ranks, before a collective.
  /// `on_failure` is called once, before this rank waits for the others to fail. It must not call the engine.
  using OnFailure = std::function<void(FailureKind kind, const std::string& text, std::optional<int> failed_rank)>;
  void set_elastic(OnFailure on_failure = {});
  bool is_elastic() const noexcept { return elastic_; }
  /// After PeerLost: returns an engine of the ranks that remain, in their order, and sets `members` to their numbers in
  /// this engine. Collective of these ranks. Throws PeerLost if they are fewer than `min_ranks`, Timeout if a rank does
  /// not come, InvalidArgument if the group has not lost a rank or is not elastic.
  std::unique_ptr<Engine> shrink(int min_ranks, std::vector<int>& members);

  /// The step before which new ranks join the group; kNoStep: none. All ranks share it.
  std::atomic<std::uint64_t>& join_step() const noexcept { return peers_.head().join_step; }
  /// Records that this engine continues the group of `former`.
  void follow(const Engine& former) noexcept {
    if (ring_.is_world(former.group_number_)) ring_.continue_world(group_number_);
  }

  /// Starts a collective. Throws the group's error if the group has failed.
  PendingHandle post(CollectiveArgs args);
  /// Runs a collective and returns when it has finished, like post() and wait(). The pointers must outlive the call.
  void run(CollectiveArgs args);
  /// Starts a send or a receive. Messages between two ranks with the same tag arrive in the order of the sends. They
  /// are independent of collectives. A send has finished when its bytes are in the channel, before they are received.
  MessageHandle post(MessageHandle message);
  /// Returns whether it has finished. Makes progress. Throws its error.
  bool test(const PendingHandle& pending);
  /// Blocks until it has finished. `timeout` counts from now; 0: the group's default. Throws its error.
  void wait(const PendingHandle& pending, std::chrono::milliseconds timeout = {});
  /// Finishes it on a background thread and then calls `then`, which must not throw, with the error or null; also if
  /// the engine is destroyed before. Only this function starts the thread. The thread sleeps while there is no work.
  void finish_in_background(PendingHandle pending, std::function<void(std::exception_ptr)> then = {});

  /// Allocates `bytes` of symmetric memory on every rank. Collective. Throws on every rank if one rank cannot allocate.
  /// With Populate::kLazy each page uses memory only after its first use. `pages`: this rank's pages, from a former
  /// group; empty: new ones.
  std::shared_ptr<SymmetricSegment> allocate(std::size_t bytes, Mapping::Populate populate = Mapping::Populate::kEager,
                                             Mapping pages = {});

  /// Throws the error of the group, if there is one.
  void check() const;
  /// The same. Throws PeerLost also if a rank has ended or failed that no collective waits for.
  void check_ranks();
  /// Waits up to `limit` until all ranks have called end() and all collectives have ended. Then every later call throws
  /// Error with `text`, and the function returns an empty string. Otherwise the group has failed: returns its error.
  std::string end(std::chrono::milliseconds limit, const char* text);
  /// Ends the group from this rank. The others throw PeerLost with `reason`.
  void abort(const std::string& reason) noexcept;
  /// Ends the group because of a failure that this rank has found elsewhere. Throws that failure, or an earlier one.
  [[noreturn]] void stop(FailureKind kind, const std::string& text, std::optional<int> failed_rank);

  /// Makes progress for a rank that waits in another group of this process: that group may indirectly depend on the
  /// operations here, through a third rank. Returns false if no operation is in progress. Never blocks, never throws.
  bool progress_from_outside() noexcept;
  /// Returns an address that is the same for all ranks of one group in this process.
  const void* group() const noexcept { return &peers_.block(0); }

  void set_timeout(std::chrono::milliseconds timeout) noexcept;
  std::chrono::milliseconds timeout() const noexcept;
  std::uint64_t sequence() const noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  // All functions require mutex_. Those with `lock` release it meanwhile.
  OperationHandle begin(std::unique_lock<std::mutex>& lock, CollectiveArgs&& args);
  bool progress();
  /// Runs the callbacks and deleters in due_.
  void settle(std::unique_lock<std::mutex>& lock);

  // Waiting.
  void wait_until(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds timeout, const Message* message,
                  const std::function<bool()>& done);
  /// `ended`: the value of Peers::ended() before this rank last checked its peers.
  void sleep(std::unique_lock<std::mutex>& lock, bool others_busy, int ended);
  void run_background();
  // `message`: the message to wait for; null for collectives.
  Awaited awaited(const Message* message) const noexcept {
    return {.message = message, .oldest = collectives_.oldest()};
  }
  /// Fails if a rank that the wait needs has ended. Returns if the operation is `done` all the same.
  void check_peers(std::unique_lock<std::mutex>& lock, const Message* message, const std::function<bool()>& done);
  void fail_if_lost(const Message* message);
  [[noreturn]] void throw_timeout(const Message* message, std::chrono::milliseconds waited,
                                  std::chrono::milliseconds timeout);

  // Failures.
  /// Waits until the other ranks have failed or ended, and then completes what one of them has completed.
  void drain();
  [[noreturn]] void fail(FailureKind kind, const std::string& text, std::optional<int> failed_rank);
  void throw_if_failed() const;
  /// Returns the number of the first collective that this rank has not completed.
  std::uint64_t first_unfinished() const noexcept {
    const Operation* oldest = collectives_.oldest();
    return oldest ? oldest->header.sequence : collectives_.next_sequence();
  }
  /// Throws the failure that another rank has published, if the rank has not completed the collective `sequence`.
  void fail_as_published(std::uint64_t sequence = std::numeric_limits<std::uint64_t>::max());

  std::chrono::milliseconds timeout_;
  EventRing& ring_ = EventRing::of_process();
  const std::uint32_t group_number_ = ring_.new_group();  ///< Unique in this process.
  mutable std::mutex mutex_;
  std::exception_ptr failure_;
  bool elastic_ = false;
  OnFailure on_failure_;
  std::vector<Due> due_;
  Peers peers_;
  Segments segments_{peers_};
  Collectives collectives_{peers_, segments_, due_, group_number_};
  Mailbox mailbox_{peers_, due_};

  struct Background {
    PendingHandle pending;
    std::function<void(std::exception_ptr)> then;  ///< Does not throw.
  };
  std::list<Background> background_;
  std::condition_variable background_wanted_;
  bool stopping_ = false;
  std::thread background_thread_;
  /// Shared with the background thread, because one of its callbacks may hold the last reference to the engine.
  std::shared_ptr<bool> ended_by_callback_ = std::make_shared<bool>(false);
};

/// A child made by fork() does not destroy the engine: the child does not have the engine's threads, and its end must
/// not be reported to the other ranks.
std::shared_ptr<Engine> share(std::unique_ptr<Engine> engine);

/// The engines of this process.
class Engines {
 public:
  static Engines& all();
  void add(Engine* engine) {
    const std::lock_guard lock(mutex_);
    engines_.push_back(engine);
    count_groups();
  }
  void remove(Engine* engine) {
    const std::lock_guard lock(mutex_);
    std::erase(engines_, engine);
    count_groups();
  }
  /// Progresses the groups other than that of `self`. Returns whether one of them has operations in progress. Ranks of
  /// one group in this process are threads that make progress separately.
  bool progress_others(const Engine* self) {
    if (groups_.load(std::memory_order_relaxed) < 2) return false;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return true;
    bool busy = false;
    for (Engine* engine : engines_) busy |= engine->group() != self->group() && engine->progress_from_outside();
    return busy;
  }

 private:
  void count_groups() {
    std::set<const void*> groups;
    for (const Engine* engine : engines_) groups.insert(engine->group());
    groups_ = groups.size();
  }

  std::mutex mutex_;
  std::vector<Engine*> engines_;
  std::atomic<std::size_t> groups_ = 0;
};

}  // namespace ddpkit::shm
