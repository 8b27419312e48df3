// Tier 0: the standard library only. The rendezvous of the launchers of several hosts.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <ddpkit/launch/host_options.h>
#include <ddpkit/launch/launch_options.h>

#include "comm/store/store_server.h"
#include "launch/host_messages.h"
#include "launch/reserved_port.h"

namespace c10d {
class Store;
}  // namespace c10d

namespace ddpkit::launcher {

/// This launcher's connection to the launchers of the other hosts. They exchange keys of one store, which the launcher
/// of host 0 serves. Only host 0 decides: which hosts take part in a round, which host is lost, and what follows a
/// round.
///
/// A launcher sends heartbeats while it waits in next(), and from watch() to finish() in a thread. Without an answer of
/// the store within the heartbeat timeout, host 0 is lost.
class HostRounds {
 public:
  /// This host's part in a round.
  struct Round {
    std::optional<int> exit_code = {};  ///< The run has ended, with this code for the launcher.
    int number = 0;                     ///< Number of earlier rounds.
    int hosts = 1, host = 0;            ///< Number of hosts, and the number of this host.
    int port = 0;                       ///< For the store of the ranks, on host 0.
  };

  /// Serves the store if no other launcher on the host of this address does, and connects. Throws InvalidArgument
  /// without a key or if the options differ from those of host 0, RendezvousError if the store cannot be reached or
  /// refuses this launcher.
  HostRounds(const LaunchOptions& launch, const HostOptions& hosts);
  ~HostRounds();
  HostRounds(const HostRounds&) = delete;
  HostRounds& operator=(const HostRounds&) = delete;

  /// Waits until a round begins in which this host takes part, or until the run has ended. Reports what host 0 has
  /// decided.
  Round next();
  /// Watches the other hosts from another thread until finish().
  void watch();
  /// Reports to host 0 how the round ended here.
  void finish(const HostResult& result);

  // For the launch, between watch() and finish().
  /// Readable when the round has ended.
  int descriptor() const noexcept { return bell_; }
  bool has_ended() const noexcept { return has_ended_; }
  /// Returns the rank that the first failed rank lost, or kNoRank, or kAnyRank.
  int blamed_rank() const noexcept { return blamed_rank_; }
  /// Ends the round on all hosts. `blamed_rank`: see RoundEnd.
  void fail(int blamed_rank) noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct Stores;
  struct Other {
    std::int64_t heartbeats = 0;
    Clock::duration silence{};
  };

  void introduce();
  void run_watch();
  /// Sends a heartbeat, and waits up to one interval. Returns whether the key exists.
  bool wait_for(const std::string& key);
  void read_heartbeats();
  bool is_alive(int id) const;
  std::vector<int> alive() const;
  std::string name_of(int id) const;
  RoundPlan first_plan();
  RoundPlan later_plan();
  void publish(const RoundPlan& plan);
  void leave();
  void post_end(c10d::Store& store, const RoundEnd& end) const;
  void report(const std::string& text) const;
  void lose_store();

  const HostOptions& hosts_;
  const std::string name_, terms_;
  const std::chrono::milliseconds interval_;
  std::optional<store::StoreServer> server_;  ///< Of host 0.
  std::unique_ptr<Stores> stores_;
  int bell_;
  int id_ = 0;  ///< Number of launchers that arrived earlier.
  int round_ = -1;
  std::vector<int> members_;  ///< IDs of the launchers of the round, in the order of their hosts. [host]
  bool is_spare_ = false;     ///< Waits while a round runs without this host.
  bool store_is_lost_ = false;

  std::thread watch_;
  std::atomic<bool> stop_{false}, has_ended_{false};
  std::atomic<int> blamed_rank_{kNoRank};

  // Of host 0.
  std::vector<Other> others_;  ///< [id - 1]
  Clock::time_point read_at_ = Clock::now();
  int restarts_ = 0;
  std::optional<ReservedPort> port_;
};

}  // namespace ddpkit::launcher
