// Tier 0: the standard library only. Memory of a rank that its launcher can read, also after the rank's death.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace ddpkit::flight {

/// Number of collectives that a rank keeps.
inline constexpr std::uint64_t kRecords = 256;
inline constexpr std::size_t kStackBytes = std::size_t{16} << 10;
/// Environment variable with the descriptor of this process's page.
inline constexpr const char* kPageVariable = "DDPKIT_FLIGHT_RECORDER_FD";

/// The first values are those of shm::CollectiveKind, in the same order.
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
  kGraphReplay,
};
const char* name_of(Call call);

enum class Phase : std::uint32_t { kStarting, kRendezvous, kTraining, kLeft };

/// How a collective failed. Same values as shm::FailureKind.
enum class Failure : std::uint32_t { kNone, kAborted, kPeerLost, kTimeout, kMismatch };

/// How the first failed collective ended.
struct Outcome {
  Failure failure{Failure::kNone};
  std::int32_t culprit{-1};  ///< Rank in the whole job; -1: none or unknown.
};
static_assert(std::atomic<Outcome>::is_always_lock_free, "processes share it");

/// One collective. Only its rank writes the fields; any process may read them at any time. A reader may see a record
/// that is being overwritten, and must accept that.
struct Record {
  std::atomic<std::uint64_t> sequence{0};    ///< Number in its group.
  std::atomic<std::uint64_t> bytes{0};       ///< Size of this rank's part.
  std::atomic<std::uint64_t> what{0};        ///< Call | group << 8 | (bucket + 1) << 32; bucket + 1 is 0 for none.
  std::atomic<std::uint64_t> started_ms{0};  ///< CLOCK_MONOTONIC; 0: unknown.
  std::atomic<std::int64_t> step{-1};        ///< The trainer's step; -1: unknown.
  std::atomic<std::uint64_t> index{0};       ///< Number of the record, over all groups.
  std::atomic<std::uint32_t> finished{0};
};
/// Returns text such as "all_reduce number 812 (4096 bytes, group 0, bucket 2)".
std::string describe(const Record& record);

struct Page {
  std::atomic<std::uint64_t> layout{0};       ///< kLayout; set by the launcher.
  std::atomic<std::int32_t> pid{0};           ///< 0 until a process has attached the page.
  std::atomic<std::int32_t> stack_signal{0};  ///< Makes the process write its stack; 0: no handler.
  std::atomic<Phase> phase{Phase::kStarting};
  std::atomic<std::int32_t> world{0};    ///< Number of ranks in the job, set at the rendezvous.
  std::atomic<std::uint32_t> stacks{0};  ///< Number of stacks written.
  std::atomic<std::uint32_t> stack_bytes{0};
  std::atomic<std::int64_t> step{-1};
  std::atomic<Outcome> outcome{Outcome{}};
  std::atomic<std::uint64_t> next{0};  ///< Number of collectives started.
  Record records[kRecords];            ///< [index % kRecords]
  char stack[kStackBytes] = {};        ///< Lines of backtrace_symbols_fd.
};

inline constexpr std::uint64_t kLayout = 0xddf1000000000001ULL ^ (sizeof(Page) << 8);

}  // namespace ddpkit::flight
