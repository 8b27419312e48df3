// Tier 1: c10d's Store. Who has come to a rendezvous.
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include <ddpkit/comm/environment.h>

namespace c10d {
class Store;
}  // namespace c10d

namespace ddpkit {

class Error;

/// Writes to stderr why a rank still waits: after 5 s, and again after increasing times.
class WaitReport {
 public:
  void write_if_late(const std::function<std::string()>& text);

 private:
  using Clock = std::chrono::steady_clock;
  std::chrono::seconds next_{5};
  Clock::time_point at_ = Clock::now() + next_;
};

/// The part of a store through which the ranks of one group meet. A rank that fails says so there, and the others fail
/// with its words.
class RollCall {
 public:
  /// `first_rank`: what messages call rank 0. `hint` ends what rank 0 writes while ranks are missing.
  RollCall(c10::intrusive_ptr<c10d::Store> store, std::string name, int rank, int world_size,
           std::chrono::milliseconds timeout, int first_rank = 0, std::string hint = {});

  /// Collective: every rank's `text`. [rank] Throws RendezvousError that names the ranks that did not come in time, or
  /// has the words of a rank that failed.
  std::vector<std::string> exchange(const std::string& text);
  /// Collective: the same without the texts.
  void wait_for_all(const std::string& text);
  /// The same without a wait.
  void come(const std::string& text);
  /// Throws RendezvousError if another rank has announced that it failed.
  void throw_if_announced() const;
  /// Tells the ranks that still wait what this rank fails with. Never throws.
  void announce(const Error& error) const noexcept;

 private:
  std::string key(int rank) const;
  std::vector<int> missing() const;
  [[noreturn]] void throw_lost_store(const c10::Error& error) const;

  c10::intrusive_ptr<c10d::Store> store_;
  std::string name_;
  int rank_;
  int world_size_;
  std::chrono::milliseconds timeout_;
  int first_rank_;
  std::string hint_;
};

/// How to leave a job whose variables are left over in the environment; empty under a launcher.
std::string alone_hint(const LaunchEnvironment& environment);

/// Collective, before a backend is made: returns when all ranks have come. Throws as RollCall::exchange(), and
/// RendezvousError when two processes of one host have the same rank.
void wait_for_ranks(const c10::intrusive_ptr<c10d::Store>& store, const LaunchEnvironment& environment,
                    std::chrono::milliseconds timeout);

/// Fills in how many of a part's ranks are on this host, and the how manieth of them this one is. A host is what one
/// loopback serves.
void find_place_on_host(c10d::Store& store, LaunchEnvironment& environment);

}  // namespace ddpkit
