// Tier 1: c10d's Store. The ranks that have arrived at a rendezvous.
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ddpkit/comm/environment.h>

namespace c10d {
class Store;
}  // namespace c10d

namespace ddpkit {

class Error;

/// Converts a text to a value of a store, and back.
inline std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
inline std::string text_of(const std::vector<std::uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

/// Prints to stderr why a rank still waits: after 5 s, then at increasing intervals.
class WaitReport {
 public:
  void write_if_late(const std::function<std::string()>& text);

 private:
  using Clock = std::chrono::steady_clock;
  std::chrono::seconds next_{5};
  Clock::time_point at_ = Clock::now() + next_;
};

/// A rendezvous of the ranks of one group through keys of a store. A rank that fails stores its error; the others throw
/// that error.
class RollCall {
 public:
  /// `first_rank`: the number of rank 0 in messages. `hint`: end of the line that rank 0 prints while ranks are
  /// missing.
  RollCall(c10::intrusive_ptr<c10d::Store> store, std::string name, int rank, int world_size,
           std::chrono::milliseconds timeout, int first_rank = 0, std::string hint = {});

  /// Returns the `text` of every rank. [rank] Collective. Throws RendezvousError, which names the ranks that did not
  /// arrive in time, or has the error of a rank that failed.
  std::vector<std::string> exchange(const std::string& text);
  /// Like exchange(), without returning the texts. Collective.
  void wait_for_all(const std::string& text);
  /// Like exchange(), without waiting.
  void come(const std::string& text);
  /// Throws RendezvousError if another rank has announced that it failed.
  void throw_if_announced() const;
  /// Reports this rank's error to the ranks that still wait. Never throws.
  void announce(const Error& error) const noexcept;
  /// Throws InvalidArgument if this rank has completed a rendezvous with this name at this store. A second one would
  /// read the texts of the first.
  void require_first() const;
  void complete() const noexcept;

 private:
  std::string key(int rank) const;
  std::string key_of_complete() const;
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

/// Returns a hint for a user whose environment still has the variables of a job; empty under a launcher.
std::string alone_hint(const LaunchEnvironment& environment);

/// Connects to the rendezvous store. With a key, the store is the launcher's, or rank 0's if only a key file is known.
/// Without a key, rank 0 serves a TCPStore at the master's address, unless torchrun does. Keys contain the run and the
/// number of earlier rendezvous of this rank at that store.
c10::intrusive_ptr<c10d::Store> connect_store(const LaunchEnvironment& environment, std::chrono::milliseconds timeout);
/// Counts a completed rendezvous: the next one at the same store uses other keys.
void note_rendezvous(const LaunchEnvironment& environment);

/// Waits until all ranks have arrived. Collective, before a backend is created. Throws like RollCall::exchange(), and
/// RendezvousError if two processes of one host have the same rank.
void wait_for_ranks(const c10::intrusive_ptr<c10d::Store>& store, const LaunchEnvironment& environment,
                    std::chrono::milliseconds timeout);

/// Sets local_rank and local_world_size of a subset of ranks. Ranks with the same loopback interface are on one host.
void find_place_on_host(c10d::Store& store, LaunchEnvironment& environment);

}  // namespace ddpkit
