// Tier 0: the standard library only. What a rank leaves in memory for its launcher to read, also after its death.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace ddpkit::flight {

/// Collectives that a rank remembers.
inline constexpr std::uint64_t kRecords = 256;
inline constexpr std::size_t kStackBytes = std::size_t{16} << 10;
/// Says which descriptor of this process is its page.
inline constexpr const char* kPageVariable = "DDPKIT_FLIGHT_RECORDER_FD";

/// The first are shm::CollectiveKind's, in its order.
enum class Call : std::uint8_t {
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
};
const char* name_of(Call call);

enum class Phase : std::uint32_t { kStarting, kMeeting, kTraining, kLeft };

/// What a collective failed with; shm::FailureKind's values.
enum class Failure : std::uint32_t { kNone, kAborted, kPeerLost, kTimeout, kMismatch };

/// How the first collective to fail ended.
struct Outcome {
  Failure failure{Failure::kNone};
  std::int32_t culprit{-1};  ///< Rank in the whole job; -1: nobody, or not known as that.
};
static_assert(std::atomic<Outcome>::is_always_lock_free, "processes share it");

/// One collective. Each field is written by its rank alone and read by anybody at any time; a reader may meet a record
/// that is being written over, and must do with what it gets.
struct Record {
  std::atomic<std::uint64_t> sequence{0};    ///< In its group.
  std::atomic<std::uint64_t> bytes{0};       ///< Of this rank's part.
  std::atomic<std::uint64_t> what{0};        ///< Call | group << 8 | (bucket + 1) << 32; bucket + 1 is 0 for none.
  std::atomic<std::uint64_t> started_ms{0};  ///< CLOCK_MONOTONIC; 0: not looked at.
  std::atomic<std::int64_t> step{-1};        ///< The trainer's, -1 when it has told none.
  std::atomic<std::uint64_t> index{0};       ///< Number of the record, through all groups.
  std::atomic<std::uint32_t> finished{0};
};
/// "all_reduce number 812 (4096 bytes, group 0, bucket 2)"
std::string describe(const Record& record);

struct Page {
  std::atomic<std::uint64_t> layout{0};       ///< kLayout; set by the launcher.
  std::atomic<std::int32_t> pid{0};           ///< 0 until a process has taken the page.
  std::atomic<std::int32_t> stack_signal{0};  ///< Makes the process write its stack; 0: it has no handler for it.
  std::atomic<Phase> phase{Phase::kStarting};
  std::atomic<std::int32_t> world{0};    ///< Ranks in the job, as the process was told when it came to meet them.
  std::atomic<std::uint32_t> stacks{0};  ///< How often a stack has been written.
  std::atomic<std::uint32_t> stack_bytes{0};
  std::atomic<std::int64_t> step{-1};
  std::atomic<Outcome> outcome{Outcome{}};
  std::atomic<std::uint64_t> next{0};  ///< Collectives started.
  Record records[kRecords];            ///< [index % kRecords]
  char stack[kStackBytes] = {};        ///< Lines, as backtrace_symbols_fd writes them.
};

inline constexpr std::uint64_t kLayout = 0xddf1000000000001ULL ^ (sizeof(Page) << 8);

}  // namespace ddpkit::flight
