// Tier 1. The ranks of a group learn of each other's failures although its backend cannot tell them.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <iosfwd>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <ddpkit/comm/environment.h>

#include "comm/call_log.h"
#include "comm/trace/page.h"

namespace c10d {
class Store;
}  // namespace c10d

namespace ddpkit {

/// A thread that holds a TCP connection to the guard of rank 0, or on rank 0 to those of all other ranks. The end of a
/// connection without a farewell is the end of a process: the kernel reports it at once. A rank that fails sends the
/// reason, which rank 0 passes on. If a collective takes longer than the timeout, rank 0 asks all ranks where they are.
class GroupGuard {
 public:
  struct Failure {
    flight::Failure kind = flight::Failure::kNone;
    int culprit = -1;  ///< Named as in messages, see below; -1: nobody.
    std::string text = {};
  };
  struct Actions {
    /// Ends the collectives of this rank. Called once, after the first failure, by the guard's thread.
    std::function<void()> abort;
    /// Called by the guard's thread while collectives are under way: what the backend has failed with, or nothing.
    std::function<std::string()> error = [] { return std::string(); };
  };

  /// Collective. `name`: this rank's number in messages. Throws RendezvousError.
  GroupGuard(const c10::intrusive_ptr<c10d::Store>& store, const LaunchEnvironment& environment,
             std::chrono::milliseconds timeout, int name);
  /// stop()
  ~GroupGuard();
  GroupGuard(const GroupGuard&) = delete;
  GroupGuard& operator=(const GroupGuard&) = delete;

  void start(Actions actions);
  /// The flight recorder's number of the group.
  void set_group(std::uint32_t group) noexcept { group_ = group; }
  std::chrono::milliseconds timeout() const noexcept { return timeout_; }
  /// Ends the thread and leaves the other ranks: with a farewell, or with a failure if an exception is under way.
  void stop() noexcept;

  /// A call of this rank is under way; see CallLog::add().
  void watch(std::uint64_t record, bool is_message, std::function<bool()> has_ended);
  /// Whether this rank's calls end within `limit`.
  bool is_idle(std::chrono::milliseconds limit);

  /// The first failure counts. The other ranks are told.
  void fail(const Failure& failure) noexcept;
  void abort(const std::string& reason) noexcept;
  bool failed() const noexcept { return failed_; }
  /// Throws the group's failure, if there is one or comes within `patience`.
  void throw_failure(std::chrono::milliseconds patience = std::chrono::milliseconds(0)) const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Peer {
    int fd = -1;    ///< -1: it has left.
    int name = -1;  ///< -1: has not yet introduced itself.
    int pid = 0;
    std::string unread = {};
    std::optional<std::string> answer = {};  ///< To the question about `late_`: empty if it is not at fault.
  };
  /// A call that takes too long. On rank 0: of any rank.
  struct LateCall {
    int name = -1;
    std::uint64_t number = 0;
    std::string kind = {}, text = {};
    Clock::time_point until = {};  ///< When the answers must have come.
  };

  /// Returns what the other ranks need to connect.
  std::string listen(const LaunchEnvironment& environment);
  void connect(const std::string& offer);
  void run();
  void accept();
  /// False at the end of the connection.
  bool read(Peer& peer);
  bool take(Peer& peer, const std::string& line);
  bool take_hello(Peer& peer, std::istream& words);
  void take_failure(Peer& peer, std::istream& words, const std::string& line);
  /// Whether to look again soon.
  bool look();
  void look_for_error();
  void ask(LateCall late);
  /// Of this rank to the question about a late call.
  std::string answer_to(const LateCall& late) const;
  void judge();
  bool note(const Failure& failure) noexcept;
  void wake() noexcept;
  void send_to_all(const std::string& line, const Peer* but = nullptr) noexcept;

  const int name_, ranks_;
  const std::chrono::milliseconds timeout_;
  const bool leads_;  ///< Is rank 0.
  const int exceptions_ = std::uncaught_exceptions();
  std::atomic<std::uint32_t> group_ = ~std::uint32_t{0};
  std::string token_;
  Actions actions_;
  int wake_ = -1, listener_ = -1;
  CallLog calls_;
  std::optional<LateCall> late_;
  std::string error_;  ///< Of the backend, found at `error_since_`.
  Clock::time_point error_since_;
  mutable std::mutex mutex_;
  std::vector<Peer> peers_;  ///< Changed by the guard's thread only.
  Failure failure_;
  std::atomic<bool> failed_ = false, stops_ = false;
  std::thread thread_;
};

}  // namespace ddpkit
