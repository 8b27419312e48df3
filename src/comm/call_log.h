// Tier 0: the standard library only. A log of the collectives that this rank has called in one group.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/trace/event_ring.h"

namespace ddpkit {

/// Thread-safe.
class CallLog {
 public:
  /// A call that has exceeded its timeout.
  struct Late {
    std::optional<std::uint64_t> number;  ///< Number of the collective in its group, from 0; empty for messages.
    std::string kind;                     ///< The same on all ranks.
    std::string text;                     ///< "all_reduce number 41 (4096 bytes, group 0, bucket 3) at step 12"
  };

  /// `index`: of the call in the ring, which is notified of the end. `has_ended` is called on another thread. Returns
  /// whether no other call was in progress. A call whose `has_ended` throws has ended; see error().
  bool add(std::uint64_t index, const Event& event, std::function<bool()> has_ended);
  /// Returns whether calls are in progress.
  bool look();
  /// Releases `has_ended` of a call that has ended. It may hold a weak pointer to the call, and LibTorch keeps the
  /// members of an object, here the tensors, until its last weak pointer is released.
  void note_end(std::uint64_t index);
  std::optional<Late> late(std::chrono::milliseconds timeout) const;
  /// Returns the first line of the first error that a `has_ended` threw; otherwise an empty string.
  std::string error() const;

  /// Returns the number of collectives called.
  std::uint64_t count() const;
  /// Returns the kind of collective `number`; "-" if it has ended or has not been called.
  std::string kind_of(std::uint64_t number) const;
  /// Returns "is in all_reduce number 41 (...)" or "is in no collective; its last one was ...".
  std::string state() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Call {
    std::uint64_t index;
    Event event;  ///< The ring may overwrite it before the call ends.
    std::optional<std::uint64_t> number;
    Clock::time_point since;
    std::function<bool()> has_ended;
  };

  mutable std::mutex mutex_;
  std::vector<Call> calls_;  ///< In progress, oldest first.
  std::uint64_t count_ = 0;
  std::optional<Event> last_;
  std::string error_;
  Clock::time_point progress_;  ///< Time of the last end of a call.
};

}  // namespace ddpkit
