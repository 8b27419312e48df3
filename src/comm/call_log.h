// Tier 0: the standard library only. The collectives of one group that this rank has called.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace ddpkit {

/// Thread-safe.
class CallLog {
 public:
  /// A call that takes too long.
  struct Late {
    std::optional<std::uint64_t> number;  ///< Of the group's collectives, from 0; empty for messages.
    std::string kind;                     ///< Equal on all ranks.
    std::string text;                     ///< "all_reduce number 41 (4096 bytes, group 0, bucket 3) at step 12"
  };

  /// `record`: of the flight recorder, which learns of the end. `has_ended` is called by another thread.
  /// Returns whether no other call was under way.
  bool add(std::uint64_t record, bool is_message, std::function<bool()> has_ended);
  /// Whether calls are under way.
  bool look();
  std::optional<Late> late(std::chrono::milliseconds timeout) const;

  /// Collectives that were called.
  std::uint64_t count() const;
  /// The kind of collective `number`; "-" if it has ended or has not been called.
  std::string kind_of(std::uint64_t number) const;
  /// "is in all_reduce number 41 (...)" or "is in no collective; its last one was ..."
  std::string state() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Call {
    std::uint64_t record;
    std::optional<std::uint64_t> number;
    Clock::time_point since;
    std::function<bool()> has_ended;
  };

  mutable std::mutex mutex_;
  std::vector<Call> calls_;  ///< Under way, oldest first.
  std::uint64_t count_ = 0;
  std::optional<std::uint64_t> last_record_;
  Clock::time_point progress_;  ///< Last end of a call.
};

}  // namespace ddpkit
