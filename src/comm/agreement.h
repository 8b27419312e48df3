// Tier 2: c10d's Work and Store.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/guard.h"
#include "comm/shm/engine.h"

namespace ddpkit {

/// Makes all ranks of a host complete the same collectives of a backend of c10d. Without it, a collective may complete
/// on some ranks only when a rank is lost.
///
/// After each collective, the ranks call a barrier in shared memory. If one rank completes the barrier, all remaining
/// ranks complete it (shm::Engine::set_elastic()). Otherwise they all throw PeerLost. Before an error is thrown, this
/// rank's calls have ended, so the backend writes to no tensor afterwards. Messages have no barrier.
///
/// Thread-safe.
class Agreement {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  /// `engine`: an elastic group of the same ranks. `guard` must outlive this object. `server`: serves the store of the
  /// group, see connect_remaining().
  Agreement(std::shared_ptr<shm::Engine> engine, GroupGuard& guard, std::shared_ptr<void> server = nullptr);
  ~Agreement();
  Agreement(const Agreement&) = delete;
  Agreement& operator=(const Agreement&) = delete;

  const std::shared_ptr<shm::Engine>& engine() const noexcept { return engine_; }

  /// Adds a started collective. `has_ended`: whether its result is complete, also on a device. Returns its number. Call
  /// it in the order of the collectives.
  std::uint64_t add(WorkPtr work, std::function<bool()> has_ended);
  /// Waits until all ranks have completed the collectives up to `number`. `timeout`: of c10d's wait(). Throws the error
  /// of the group.
  void wait(std::uint64_t number, std::chrono::milliseconds timeout = kNoTimeout);
  /// Returns whether wait() would return or throw immediately. Makes progress.
  bool test(std::uint64_t number);
  /// Throws the error of the group, if there is one.
  void check();
  /// A call of the backend has failed: throws the error of the group. Returns if there is none, and aborts the group
  /// with `reason`.
  void fail(const std::string& reason);
  /// Waits until all ranks have completed all collectives. Returns an empty string, or what failed within `limit`.
  std::string end(std::chrono::milliseconds limit);

 private:
  struct Call {
    WorkPtr work;
    std::function<bool()> has_ended;
    shm::PendingHandle barrier;  ///< Null until `work` has ended.
  };

  // These functions require mutex_.
  /// Runs `call`. If it throws, waits for the end of this rank's calls.
  void run(const std::function<void()>& call);
  void order_after_calls();
  void throw_if_failed();
  void find_failure(const std::string& reason);
  void wait_for_work(Call& call, std::chrono::milliseconds timeout);
  void post_barrier(Call& call);
  void remove_first();

  const std::shared_ptr<shm::Engine> engine_;
  GroupGuard& guard_;
  const std::shared_ptr<void> server_;
  std::mutex mutex_;
  std::deque<Call> calls_;       ///< Started, and not completed by all ranks.
  std::uint64_t completed_ = 0;  ///< Number of the first of them.
};

/// Returns a part of `store` that waits for keys only while all ranks of `engine` run. Each call that waits for a key
/// throws PeerLost if a rank ends.
c10::intrusive_ptr<c10d::Store> watch(const std::string& prefix, c10::intrusive_ptr<c10d::Store> store,
                                      std::shared_ptr<shm::Engine> engine);

/// Connects the ranks of `engine` and new ranks as another elastic group, in which this rank is `rank`. Collective of
/// all of them. `names`: numbers in messages. [rank] Throws PeerLost if a rank of `engine` ends.
std::shared_ptr<shm::Engine> connect_with_new(const std::shared_ptr<shm::Engine>& engine,
                                              const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                              const std::vector<int>& names);

/// A store of the ranks that remain after a loss.
struct RemainingStore {
  c10::intrusive_ptr<c10d::Store> store;
  std::shared_ptr<void> server;  ///< On rank 0, which serves the store. Must exist as long as a rank uses the store.
};

/// Time in which the remaining ranks must connect.
inline constexpr std::chrono::seconds kReconnectLimit(10);

/// Creates a store among the ranks of `engine`, which need no earlier store: that one may have ended with rank 0.
/// Collective. Each call that waits for a key throws PeerLost if a rank ends.
RemainingStore connect_remaining(const std::shared_ptr<shm::Engine>& engine);

}  // namespace ddpkit
