// Tier 0: the standard library only. The ring of a process's last events, which its launcher can read, also after the
// process's death.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace ddpkit {

/// Number of events that a process keeps.
inline constexpr std::uint64_t kEvents = 1024;
/// Index of a call that is not recorded.
inline constexpr std::uint64_t kNoEvent = ~std::uint64_t{0};
inline constexpr std::size_t kStackBytes = std::size_t{16} << 10;
/// Environment variable with the descriptor of this process's page.
inline constexpr const char* kEventPageVariable = "DDPKIT_FLIGHT_RECORDER_FD";
/// Environment variable of a process that replaces a lost rank.
inline constexpr const char* kReplacesVariable = "DDPKIT_REPLACES_RANK";

/// The first values are those of shm::CollectiveKind, in the same order.
enum class EventKind : std::uint8_t {
  kBarrier,
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kGather,
  kScatter,
  kReduceScatter,
  kAllToAll,
  kAllReduceCoalesced,
  kReduceScatterCoalesced,
  kSend,
  kReceive,
  kGraphReplay,
  // Activities.
  kForward,
  kBackward,
  kBucket,     ///< From the last gradient to the end of the reduction.
  kReduction,  ///< Of a bucket.
  kBucketWait,
  kBroadcastBuffers,
  kSpan,
};
const char* name_of(EventKind kind);
inline bool is_activity(EventKind kind) { return kind >= EventKind::kForward; }

/// A collective, a message, or an activity in a timeline.
struct Event {
  std::uint64_t index = 0;  ///< Number in this process; set by EventPage::read().
  EventKind kind = EventKind::kBarrier;
  std::uint32_t group = 0;     ///< Number of the group in this process.
  std::int32_t bucket = -1;    ///< -1: none.
  std::uint64_t sequence = 0;  ///< Number in its group. kBucket: number of parameters.
  std::uint64_t bytes = 0;     ///< Size of this rank's part.
  std::int64_t step = -1;      ///< Of a call, the trainer's step; of an activity, the backward. -1: unknown.
  std::int64_t begin_ns = 0;   ///< CLOCK_MONOTONIC; 0: unknown.
  std::int64_t end_ns = 0;     ///< Of an activity.
  bool finished = false;
};
inline std::int64_t nanoseconds(std::chrono::steady_clock::time_point time) {
  return std::chrono::nanoseconds(time.time_since_epoch()).count();
}
inline std::int64_t now_ns() { return nanoseconds(std::chrono::steady_clock::now()); }
/// Returns an activity that has ended.
inline Event activity(EventKind kind, std::chrono::steady_clock::time_point begin,
                      std::chrono::steady_clock::time_point end, std::int32_t bucket = -1) {
  return {.kind = kind, .bucket = bucket, .begin_ns = nanoseconds(begin), .end_ns = nanoseconds(end)};
}
/// Returns text such as "all_reduce number 812 (4096 bytes, group 0, bucket 2)" or "wait for bucket 2".
std::string describe(const Event& event);

/// kJoining: a new rank waits until the others let it join.
enum class RankPhase : std::uint32_t { kStarting, kJoining, kRendezvous, kTraining, kLeft };

/// How a collective failed.
enum class FailureKind : std::uint32_t { kNone, kAborted, kPeerLost, kTimeout, kMismatch };

/// How the first failed collective ended.
struct Outcome {
  FailureKind failure{FailureKind::kNone};
  std::int32_t failed_rank{-1};  ///< Rank in the whole job; -1: none or unknown.
};
static_assert(std::atomic<Outcome>::is_always_lock_free, "processes share it");

/// Memory that the launcher maps. Only its rank writes to it, except to `joining`.
struct EventPage {
  /// Event `index` is in slot `index % kEvents`. Two threads that start an event at the same time may write to the same
  /// slot, and a reader may read a slot that is being written: `check` detects both.
  struct alignas(64) Slot {
    std::atomic<std::uint64_t> what{0};  ///< Kind | group << 8 | (bucket + 1) << 32.
    std::atomic<std::uint64_t> sequence{0}, bytes{0};
    std::atomic<std::int64_t> step{0}, begin_ns{0}, end_ns{0};
    std::atomic<std::uint64_t> check{0};  ///< Hash of the index and of the words above.
    std::atomic<std::uint64_t> state{0};  ///< 2 * index, plus 1 if the event has finished.
  };

  std::atomic<std::uint64_t> layout{0};       ///< kLayout; set by the launcher.
  std::atomic<std::int32_t> pid{0};           ///< 0 until a process has attached the page.
  std::atomic<std::int32_t> stack_signal{0};  ///< Makes the process write its stack; 0: no handler.
  std::atomic<RankPhase> phase{RankPhase::kStarting};
  std::atomic<std::int32_t> world{0};    ///< Number of ranks in the job, set at the rendezvous.
  std::atomic<std::int32_t> joining{0};  ///< Number of new ranks that wait to join; set by the launcher.
  std::atomic<std::uint32_t> stacks{0};  ///< Number of stacks written.
  std::atomic<std::uint32_t> stack_bytes{0};
  std::atomic<std::int64_t> step{-1};
  std::atomic<Outcome> outcome{Outcome{}};
  alignas(64) std::atomic<std::uint64_t> next{0};  ///< Number of events started.
  Slot slots[kEvents];
  char stack[kStackBytes] = {};  ///< Lines of backtrace_symbols_fd.

  static constexpr std::uint64_t kLayout = 0xddf1000000000003ULL ^ (std::uint64_t{kEvents * sizeof(Slot)} << 8);

  /// Returns event `index`; empty if it is being written or was overwritten. Any process may call it at any time.
  std::optional<Event> read(std::uint64_t index) const noexcept;
};

/// The events of this process: in the page that the launcher reads, or in private memory without such a launcher. A
/// call costs a few stores: it takes no lock and reads the clock rarely. Thread-safe. If two threads start an event at
/// the same time, the ring may lose one.
class EventRing {
 public:
  /// Never destroyed: static objects may call collectives until the program ends.
  static EventRing& of_process() noexcept;

  EventRing(const EventRing&) = delete;
  EventRing& operator=(const EventRing&) = delete;

  /// Returns a number for a new group of this process, from 0.
  std::uint32_t new_group() noexcept { return groups_.fetch_add(1); }
  /// Returns whether it is the group of all ranks of the job.
  bool is_world(std::uint32_t group) const noexcept { return group == world_group_.load(std::memory_order_relaxed); }

  /// Records the start of a call. Sets the bucket, step and time of `call`. Returns the event's index, for finish().
  std::uint64_t begin(Event& call) noexcept {
    call.bucket = bucket_.load(std::memory_order_relaxed);
    if (call.bucket >= 0) bucket_.store(-1, std::memory_order_relaxed);
    call.step = page_->step.load(std::memory_order_relaxed);
    // Reading the coarse clock takes 6 ns, so it is read only for some of the small collectives.
    if (call.bytes > kLargeBytes || page_->next.load(std::memory_order_relaxed) % kSmallBetweenLooks == 0)
      call.begin_ns = coarse_now_ns();
    return append(call);
  }
  void finish(std::uint64_t index) noexcept {
    std::atomic<std::uint64_t>& state = page_->slots[index % kEvents].state;
    if (state.load(std::memory_order_relaxed) == 2 * index) state.store(2 * index + 1, std::memory_order_release);
  }
  /// Records an activity that has ended.
  void add(const Event& activity) noexcept { finish(append(activity)); }
  /// Records that this rank has started a long wait for a collective.
  void waits(std::uint64_t index) noexcept;

  /// Sets the bucket of the next collective.
  void set_bucket(std::size_t bucket) noexcept {
    bucket_.store(static_cast<std::int32_t>(bucket), std::memory_order_relaxed);
  }
  void set_step(std::int64_t step) noexcept { page_->step.store(step, std::memory_order_relaxed); }
  /// Records that this rank waits in the rendezvous of `world` ranks. The next group is the group of all these ranks.
  void start_rendezvous(int world) noexcept {
    world_group_.store(groups_.load());
    page_->outcome.store(Outcome{});
    page_->world.store(world, std::memory_order_relaxed);
    page_->phase.store(RankPhase::kRendezvous, std::memory_order_release);
  }
  /// Records that `group` continues the group of all ranks, after the loss of a rank.
  void continue_world(std::uint32_t group) noexcept {
    world_group_.store(group);
    page_->outcome.store(Outcome{});
  }
  /// Returns whether new ranks wait to join the group of all ranks.
  bool others_join() const noexcept { return page_->joining.load(std::memory_order_relaxed) > 0; }
  void set_phase(RankPhase phase) noexcept { page_->phase.store(phase, std::memory_order_relaxed); }
  /// Records that this rank leaves the group of all ranks. Call it before the others can detect it.
  void leave() noexcept { page_->phase.store(RankPhase::kLeft); }
  /// Records the failure; only the first counts. `failed_rank`: rank in the whole job, if known.
  void fail(FailureKind failure, std::optional<int> failed_rank) noexcept;

  /// Returns the signal that makes this process write its stack, to the page or, without a launcher, to stderr. 0:
  /// none.
  int stack_signal() const noexcept { return page_->stack_signal.load(std::memory_order_relaxed); }
  /// Returns whether a launcher reads the page.
  bool is_read() const noexcept { return fd_ >= 0; }

 private:
  EventRing() noexcept;
  void attach() noexcept;
  void install_handler() noexcept;
  static void write_stack(int signal);
  static std::int64_t coarse_now_ns() noexcept;

  std::uint64_t append(const Event& event) noexcept {
    const std::uint64_t index = page_->next.load(std::memory_order_relaxed);
    write(index, event);
    page_->next.store(index + 1, std::memory_order_release);
    return index;
  }
  void write(std::uint64_t index, const Event& event) noexcept;

  static constexpr std::uint64_t kLargeBytes = 32 << 10;
  static constexpr std::uint64_t kSmallBetweenLooks = 8;

  EventPage* page_ = nullptr;
  int fd_ = -1;
  std::atomic<std::int32_t> bucket_{-1};  ///< Bucket of the next collective; -1: none.
  std::atomic<std::uint32_t> groups_{0};
  std::atomic<std::uint32_t> world_group_{0};
};

/// Returns a hash of the words. Their order counts.
template <class... Words>
std::uint64_t hash_of(std::uint64_t first, Words... words) noexcept {
  std::uint64_t mixed = first + 1;
  ((mixed = (mixed ^ static_cast<std::uint64_t>(words)) * 0x9e3779b97f4a7c15ULL), ...);
  return mixed;
}

inline void EventRing::write(std::uint64_t index, const Event& event) noexcept {
  EventPage::Slot& slot = page_->slots[index % kEvents];
  const auto kind = static_cast<std::uint64_t>(event.kind), bucket = static_cast<std::uint64_t>(event.bucket + 1);
  const std::uint64_t what = kind | (std::uint64_t{event.group} << 8) | (bucket << 32);
  slot.what.store(what, std::memory_order_relaxed);
  slot.sequence.store(event.sequence, std::memory_order_relaxed);
  slot.bytes.store(event.bytes, std::memory_order_relaxed);
  slot.step.store(event.step, std::memory_order_relaxed);
  slot.begin_ns.store(event.begin_ns, std::memory_order_relaxed);
  slot.end_ns.store(event.end_ns, std::memory_order_relaxed);
  slot.check.store(hash_of(index, what, event.sequence, event.bytes, event.step, event.begin_ns, event.end_ns),
                   std::memory_order_relaxed);
  slot.state.store(2 * index, std::memory_order_relaxed);
}

}  // namespace ddpkit
