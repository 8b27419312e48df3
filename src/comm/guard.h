// Tier 1. Reports failures between the ranks of a group whose backend cannot report them.
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
#include "comm/shm/process_watch.h"
#include "comm/trace/event_ring.h"

namespace c10d {
class Store;
}  // namespace c10d

namespace ddpkit {

/// A thread with a TCP connection to the guard of rank 0; on rank 0, to the guards of all other ranks. If a process
/// ends, the kernel closes its connection without a "bye" line. On one host, the guard also watches the processes,
/// because the kernel closes the connections of a large process late. A rank that fails
/// sends the reason to rank 0, which forwards it. If a collective takes longer than the timeout, rank 0 asks all ranks
/// for their state.
class GroupGuard {
 public:
  struct Failure {
    FailureKind kind = FailureKind::kNone;
    int failed_rank = -1;  ///< Rank as in messages (`name` below); -1: none.
    std::string text = {};
    /// Returns the line for the other ranks.
    std::string line() const;
  };
  struct Actions {
    /// Ends the collectives of this rank. Called once, after the first failure, on the guard's thread.
    std::function<void()> abort;
    /// Returns the error of the backend, or an empty string. Called on the guard's thread while collectives run.
    std::function<std::string()> error = [] { return std::string(); };
  };

  /// Collective. `name`: this rank's number in messages. Throws RendezvousError.
  GroupGuard(const c10::intrusive_ptr<c10d::Store>& store, const LaunchEnvironment& environment,
             std::chrono::milliseconds timeout, int name);
  /// Calls stop().
  ~GroupGuard();
  GroupGuard(const GroupGuard&) = delete;
  GroupGuard& operator=(const GroupGuard&) = delete;

  void start(Actions actions);
  /// Sets the number of the group in the ring of events.
  void set_group(std::uint32_t group) noexcept { group_ = group; }
  std::chrono::milliseconds timeout() const noexcept { return timeout_; }
  /// Waits up to `limit` until this rank's calls have ended and all ranks have called end(). Then returns an empty
  /// string, otherwise what was missing. Reports a failure to the other ranks if an exception is being thrown.
  std::string end(std::chrono::milliseconds limit);
  /// Ends the thread and closes the connections. Reports a failure to the other ranks if an exception is being thrown.
  void stop() noexcept;

  /// Adds a started call of this rank; see CallLog::add().
  void watch(std::uint64_t index, const Event& event, std::function<bool()> has_ended);
  /// The call has ended; see CallLog::note_end().
  void note_end(std::uint64_t index);
  /// Returns whether this rank's calls end within `limit`, without a failure.
  bool is_idle(std::chrono::milliseconds limit);

  /// Sets the failure and reports it to the other ranks. Only the first failure counts.
  void fail(const Failure& failure) noexcept;
  void abort(const std::string& reason) noexcept;
  bool failed() const noexcept { return failed_; }
  /// Throws the group's failure. Waits up to `patience` for one.
  void throw_failure(std::chrono::milliseconds patience = std::chrono::milliseconds(0)) const;

 private:
  using Clock = std::chrono::steady_clock;
  /// Lines are sent in one piece and never block, because they are shorter than the buffer of a socket.
  static constexpr std::size_t kMostText = 2000;
  struct Peer {
    int fd = -1;    ///< -1: disconnected.
    int name = -1;  ///< -1: no "hello" line received yet.
    int pid = 0;
    std::string unread = {};
    std::optional<std::string> answer = {};         ///< Answer about `late_`; empty text: this peer is not the cause.
    bool ends = false;                              ///< It has called end().
    std::optional<std::uint64_t> calls = {};        ///< It has left the group; its number of collectives.
    std::optional<shm::ProcessWatch> process = {};  ///< Only on one host.
  };
  /// A call that exceeded its timeout. On rank 0: of any rank.
  struct LateCall {
    int name = -1;
    std::uint64_t number = 0;
    std::string kind = {}, text = {};
    Clock::time_point until = {};  ///< Deadline for the answers.
  };

  /// Returns the data that the other ranks need to connect.
  std::string listen(const LaunchEnvironment& environment);
  void connect(const std::string& offer);
  void run();
  /// Returns whether there was a connection.
  bool accept();
  /// Reads the process of a peer from its line.
  static bool read_process(std::istream& words, Peer& peer);
  /// Returns false at the end of the connection.
  bool read(Peer& peer);
  void fail_as_ended(const Peer& peer);
  bool take(Peer& peer, const std::string& line);
  bool take_hello(Peer& peer, std::istream& words);
  void take_failure(Peer& peer, std::istream& words, const std::string& line);
  /// Returns whether to call look() again soon.
  bool look();
  void look_for_error(bool is_busy);
  /// Fails if this rank has called a collective that a rank never called before it left.
  void look_for_left_peers();
  /// Finds ended processes whose connections the kernel has not closed yet, because it still frees their memory.
  void look_for_ended_peers();
  void disconnect(Peer& peer);
  void ask(LateCall late);
  /// Returns this rank's answer about a late call.
  std::string answer_to(const LateCall& late) const;
  void judge();
  /// On rank 0: notifies the other ranks when all ranks have called end().
  void look_for_end();
  /// Returns whether a connection has ended before its rank called end().
  bool has_lost_peer() const;
  void fail_if_unwinding() noexcept;
  bool note(const Failure& failure) noexcept;
  void wake() noexcept;
  void send_to_all(const std::string& line, const Peer* but = nullptr) noexcept;

  const int name_, ranks_;
  const std::chrono::milliseconds timeout_;
  const bool leads_;  ///< True on rank 0.
  const int exceptions_ = std::uncaught_exceptions();
  std::atomic<std::uint32_t> group_ = ~std::uint32_t{0};
  std::string token_;
  Actions actions_;
  int wake_ = -1, listener_ = -1;
  CallLog calls_;
  std::optional<LateCall> late_;
  std::string error_;  ///< Error of a call or of the backend, found at `error_since_`.
  Clock::time_point error_since_;
  mutable std::mutex mutex_;
  std::vector<Peer> peers_;  ///< Only the guard's thread changes it.
  Failure failure_;
  std::atomic<bool> failed_ = false, stops_ = false;
  std::atomic<bool> ends_ = false, all_end_ = false;  ///< This rank has called end(); all ranks have.
  std::thread thread_;
};

}  // namespace ddpkit
