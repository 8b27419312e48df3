// Tier 0: the standard library only.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/shm/control.h"
#include "comm/shm/mapping.h"
#include "comm/shm/messages.h"
#include "comm/shm/process_watch.h"
#include "comm/trace/recorder.h"
#include "kernels/reduce.h"

namespace ddpkit::shm {

using kernels::Reduction;

/// Memory that all ranks map, at the same offsets of the same segment number, at addresses of their own.
struct SymmetricSegment {
  std::uint32_t id = 0;           ///< From 1, the same on all ranks.
  std::vector<std::byte*> base;   ///< Rank r's pages, as mapped here. [rank]
  std::size_t bytes = 0;          ///< Of each rank.
  std::vector<Mapping> mappings;  ///< [rank]
};

/// Part of a coalesced collective: a dense tensor in symmetric memory.
struct Piece {
  void* data = nullptr;
  std::size_t numel = 0;
  void* slice = nullptr;  ///< Reduce-scatter: where this rank's slice goes.
};

/// One collective, as asked for. Pointers are to dense memory of `numel` elements each.
struct Request {
  CollectiveKind kind = CollectiveKind::kBarrier;
  DataType dtype = DataType::kUInt8;
  Reduction op = Reduction::kSum;               ///< All-reduce, reduce, reduce-scatter.
  int root = 0;                                 ///< Reduce, broadcast, gather, scatter.
  const void* input = nullptr;                  ///< What this rank gives, where all ranks get the same.
  void* output = nullptr;                       ///< What this rank gets, where that is one piece. May be the input.
  std::size_t numel = 0;                        ///< Of a piece; all-to-all: of the largest piece sent.
  std::vector<const void*> inputs = {};         ///< Scatter (root), reduce-scatter, all-to-all: for each rank. [rank]
  std::vector<void*> outputs = {};              ///< All-gather, gather (root), all-to-all: from each rank. [rank]
  std::vector<std::size_t> send_numel = {};     ///< All-to-all. [rank]
  std::vector<std::size_t> receive_numel = {};  ///< All-to-all. [rank]
  std::vector<Piece> pieces = {};               ///< Coalesced: at most kMaxPieces; `numel` is their sum.
  bool monitored = false;                       ///< Barrier: a timeout names the ranks in the words of c10d.
  bool names_all = false;                       ///< Where `monitored`: all missing ranks, not the first one.
  std::shared_ptr<void> keep_alive = {};        ///< Whatever owns the pointers.
  std::function<void()> on_finish = {};         ///< Runs once when it has succeeded, before it counts as finished.
};

/// A collective under way.
struct Operation;
using OperationHandle = std::shared_ptr<Operation>;

/// The collectives of one rank in one group of processes that share memory.
///
/// There is no thread behind it. A collective moves on whenever one of the group's calls passes by: each post() and
/// each turn of a wait() takes every collective under way as far as the other ranks allow, and never blocks in between.
/// So with one core a rank nothing takes cycles from the training loop.
///
/// Each collective is cut into tickets (chunks). A ticket goes through three steps on every rank, in order:
///   arrive   this rank's data is where the others can read it (its staging slot, or symmetric memory as it stands),
///   reduce   where the work is shared: this rank's slice of the chunk is reduced for all,
///   finish   the result is in this rank's output.
/// A rank may arrive at a ticket while others still finish earlier ones, as far as its staging slots reach.
///
/// Errors are final: the first one ends the group, every later call throws it again, and the other ranks are told.
///
/// A wait in one group moves the process's other groups on too.
///
/// `on_finish` runs and `keep_alive` is released without a lock, on whichever thread made the progress.
///
/// Thread-safe, but the order of collectives must be the same on all ranks.
class Engine {
 public:
  /// `control` is mapped by all ranks, whose processes are `pids` [rank]; returns when all have joined. Throws
  /// RendezvousError when one does not in time, PeerLost when one ends or gives up before.
  /// `first_rank`: what errors call rank 0, where the group is a part of a larger one.
  Engine(Mapping control, int rank, std::vector<int> pids, std::chrono::milliseconds timeout, int first_rank = 0);
  /// Marks this rank as having left. Does not wait for anybody.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int rank() const noexcept { return rank_; }
  int world_size() const noexcept { return world_size_; }
  /// False in a child made by fork(), which is no rank.
  bool is_of_this_process() const noexcept;

  /// Starts a collective. Throws what ended the group, if it has ended.
  PendingHandle post(Request request);
  /// Runs a collective to its end: post() and wait() in one, for pointers that outlive the call.
  void run(Request request);
  /// Starts a send or a receive. Messages between two ranks with one tag arrive in the order they were sent; they are
  /// independent of collectives. A send is finished when its bytes are on their way, not when they are received.
  MessageHandle post(MessageHandle message);
  /// True when it is finished; makes progress. Throws what it failed with.
  bool test(const PendingHandle& pending);
  /// Blocks until it is finished; `timeout` counts from now, 0 is the group's default. Throws what it failed with.
  void wait(const PendingHandle& pending, std::chrono::milliseconds timeout = {});
  /// Sees to it that it finishes though nobody waits for it, then calls `then`, which does not throw, with what it
  /// failed with, or null; also when this engine ends before. The one thing that takes a thread; the thread sleeps
  /// while there is nothing to do.
  void finish_in_background(PendingHandle pending, std::function<void(std::exception_ptr)> then = {});

  /// Collective: `bytes` of symmetric memory on every rank. Throws on every rank when one cannot have it.
  /// With Fill::kOnTouch each page takes memory only once it is used.
  std::shared_ptr<SymmetricSegment> allocate(std::size_t bytes, Mapping::Fill fill = Mapping::Fill::kNow);

  /// Ends the group from this rank; the others throw PeerLost with `reason`.
  void abort(const std::string& reason) noexcept;

  /// Progress on behalf of a rank that waits in another of its groups: what it has under way here may be what that one
  /// waits for, by way of a third rank. False when nothing is under way. Never blocks, never throws.
  bool progress_from_outside() noexcept;
  /// The same for all ranks of one group in this process.
  const void* group() const noexcept { return blocks_; }

  void set_timeout(std::chrono::milliseconds timeout) noexcept;
  std::uint64_t sequence() const noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  RankBlock& block(int rank) const noexcept { return blocks_[rank]; }
  /// The number by which users know the rank.
  int named(int rank) const noexcept { return first_rank_ + rank; }
  std::string named(const std::vector<int>& ranks) const;
  int pid(int rank) const noexcept { return pids_[static_cast<std::size_t>(rank)]; }
  Progress& mine() const noexcept { return blocks_[rank_].progress; }

  // Progress; all under mutex_.
  bool progress();
  /// All is done but for callbacks and deleters, which settle() runs.
  template <class Handle>
  void complete(const Handle& pending, std::function<void()>& on_finish, std::shared_ptr<void>& keep_alive) {
    pending->over = true;
    if (!on_finish) pending->finished = true;
    if (on_finish || keep_alive) due_.push_back({pending, std::move(on_finish), std::move(keep_alive)});
  }
  void settle(std::unique_lock<std::mutex>& lock);
  bool match();
  bool arrive();
  bool reduce_slices();
  bool finish();
  void resolve();
  void agree(Operation& operation);
  Operation* at(std::uint64_t sequence) const noexcept;
  void copy_in(const Operation& operation, std::uint64_t ticket);
  void copy_others_slices(const Operation& operation, std::uint64_t ticket);
  void reduce_slice(const Operation& operation, std::uint64_t ticket);
  /// This rank's share of a collective whose tensors all ranks read, and write, where they lie.
  void move_in_place(const Operation& operation);
  void reduce_in_place(const Operation& operation);
  void reduce_pieces_to_slices(const Operation& operation);
  /// Whether the result of a reduction comes to this rank: of a reduce, the root alone.
  bool wants_result(const Request& request) const noexcept {
    return request.kind != CollectiveKind::kReduce || request.root == rank_;
  }
  /// Takes the result of a ticket, and copies this rank's data of ticket `along` in on the way.
  void copy_out(const Operation& operation, std::uint64_t ticket, std::optional<std::uint64_t> along);
  bool slot_is_free(std::uint64_t ticket) const noexcept;
  std::byte* slot(int rank, std::uint64_t ticket) const noexcept;
  void locate(Operation& operation);
  struct Located {
    SymmetricAddress address{};
    std::shared_ptr<SymmetricSegment> segment;
  };
  /// Where in symmetric memory; an empty segment for private memory.
  Located locate(const void* data, std::size_t bytes) const;
  SymmetricAddress address_in(const SymmetricSegment& segment, const void* data, std::size_t bytes) const;
  std::shared_ptr<SymmetricSegment> segment(std::uint32_t id) const;
  void run_alone(const OperationHandle& operation);
  bool all_reached(std::atomic<std::uint64_t> Progress::*count, std::uint64_t enough) const noexcept;
  void raise(std::atomic<std::uint64_t>& count, std::uint64_t value) noexcept;
  void tell_peers() noexcept;
  void ring_sleepers() noexcept;
  OperationHandle new_operation();
  OperationHandle begin(std::unique_lock<std::mutex>& lock, Request request);
  void enqueue(std::unique_lock<std::mutex>& lock, const OperationHandle& operation);

  // Waiting.
  void join();
  void wait_until(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds timeout, const Message* message,
                  const std::function<bool()>& done);
  /// `ended`: ended_peers() before this rank last looked at them.
  void sleep(std::unique_lock<std::mutex>& lock, bool others_busy, int ended);
  /// Ranks that have announced a failure or left; this number never falls.
  int ended_peers() const noexcept;
  void ring(int rank) noexcept;
  void run_background();
  // `message`: what is waited for, null for collectives.
  std::vector<int> missing_ranks(const Message* message) const;
  void check_peers(const Message* message);
  [[noreturn]] void throw_timeout(const Message* message, std::chrono::milliseconds waited,
                                  std::chrono::milliseconds timeout);
  std::string last_call(int rank) const;
  std::string current_call(const Message* message) const;

  // Failing.
  void compare_headers(const Operation& operation);
  void compare_counts(const Operation& operation, int rank, const std::byte* slot);
  [[noreturn]] void fail(FailureKind kind, const std::string& text, std::optional<int> culprit);
  void announce(FailureKind kind, const std::string& text, std::optional<int> culprit) noexcept;
  /// What another rank has announced.
  struct Told {
    FailureKind kind = FailureKind::kNone;
    std::string text;
    std::optional<int> culprit;
  };
  std::optional<Told> told_by(int rank) const;
  /// Throws what the rank has announced, if it has.
  void throw_told_by(int rank) const;
  Mapping open(int rank, int fd, std::size_t bytes, Mapping::Fill fill) const;
  std::string describe_call(const CollectiveHeader& header) const;
  void throw_if_failed() const;

  const int rank_;
  const int world_size_;
  const int first_rank_;
  const std::vector<int> pids_;  ///< [rank]
  std::chrono::milliseconds timeout_;
  Mapping control_;
  RankBlock* blocks_ = nullptr;        ///< [rank]
  std::vector<Mapping> staging_;       ///< [rank]
  std::vector<Mapping> channels_;      ///< Those that lead from rank r. [rank]
  std::vector<ProcessWatch> watches_;  ///< [rank]
  bool core_each_ = false;             ///< There is a core for each rank, so that spinning takes it from nobody.

  mutable std::mutex mutex_;
  std::exception_ptr failure_;
  std::uint64_t next_sequence_ = 0;
  /// Collectives under way, oldest first, and the sequence number of the front one.
  std::deque<OperationHandle> operations_;
  std::uint64_t first_sequence_ = 0;
  std::uint64_t resolved_ = 0;     ///< Collectives whose path, and so whose tickets, are known.
  std::uint64_t next_ticket_ = 0;  ///< First ticket of the next collective to be resolved.
  // The collectives at which this rank's next ticket to arrive at, to reduce and to finish belongs.
  std::uint64_t arrive_sequence_ = 0;
  std::uint64_t reduce_sequence_ = 0;
  bool raised_ = false;  ///< Counts have been raised that sleeping peers have not been told of.
  /// What settle() has to run.
  struct Due {
    PendingHandle pending;
    std::function<void()> on_finish;
    std::shared_ptr<void> keep_alive;
  };
  std::vector<Due> due_;
  std::vector<OperationHandle> spare_;  ///< Finished, for reuse: a small collective must not wait for the allocator.
  std::vector<void*> parts_;            ///< Scratch: where each rank's part of a reduction lies. [rank]
  std::vector<std::weak_ptr<SymmetricSegment>> segments_;
  std::uint32_t next_segment_ = 1;
  std::unique_ptr<Mailbox> mailbox_;
  flight::Recorder& recorder_ = flight::Recorder::of_process();
  const std::uint32_t group_number_ = recorder_.new_group();  ///< In this process, for the recorder.

  struct Background {
    PendingHandle pending;
    std::function<void(std::exception_ptr)> then;  ///< Does not throw.
  };
  std::list<Background> background_;
  std::condition_variable background_wanted_;
  bool stopping_ = false;
  std::thread background_thread_;
  /// Shared with the background thread, one of whose callbacks may be the last to hold the engine.
  std::shared_ptr<bool> ended_by_callback_ = std::make_shared<bool>(false);
};

}  // namespace ddpkit::shm
