// Tier 0: the standard library only. The layout of the memory through which the ranks of a group talk.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

namespace ddpkit::shm {

inline constexpr std::size_t kCacheLine = 64;
/// Collectives that a rank may have under way before it waits for the others to have seen the oldest.
inline constexpr std::uint64_t kMaxOutstanding = 64;
/// Staging slots a rank, and bytes in each: all of them fit the L2 cache together, and eight keep a rank that copies
/// in, one that reduces and one that copies out busy together.
inline constexpr std::uint64_t kSlots = 8;
inline constexpr std::size_t kSlotBytes = std::size_t{64} << 10;
/// Tensors of one coalesced collective.
inline constexpr std::size_t kMaxPieces = 64;

enum class CollectiveKind : std::uint8_t {
  kBarrier,
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kGather,
  kScatter,
  kReduceScatter,
  kAllToAll,
  // Of several tensors in symmetric memory, where they stand.
  kAllReduceCoalesced,
  kReduceScatterCoalesced,  ///< Rank r gets the r-th slice (slice_of) of each.
};

inline constexpr bool is_coalesced(CollectiveKind kind) {
  return kind == CollectiveKind::kAllReduceCoalesced || kind == CollectiveKind::kReduceScatterCoalesced;
}

/// Where memory lies that all ranks map.
struct SymmetricAddress {
  std::uint32_t segment;  ///< 0 for private memory.
  std::uint64_t offset;   ///< In bytes; each rank's own.
};

/// What a rank says of a collective before it takes part. Ranks compare everything up to `address`.
struct CollectiveHeader {
  std::uint64_t sequence;
  std::uint64_t numel;  ///< Of one piece; all-to-all: of this rank's largest piece, which others need not share.
  CollectiveKind kind;
  std::uint8_t dtype;      ///< DataType
  std::uint8_t reduce_op;  ///< ReduceOp
  std::int32_t root;
  std::uint32_t pieces;       ///< Tensors of a coalesced collective, whose addresses are in RankBlock::pieces.
  std::uint64_t piece_sizes;  ///< A hash of their numbers of elements.
  SymmetricAddress address;   ///< Of the tensor that the others read.
};

/// A header in shared memory. Its owner writes the next one over it without asking who still reads it: a reader may get
/// parts of both, and must find out from the counts.
class SharedHeader {
 public:
  void store(const CollectiveHeader& header) noexcept {
    std::uint64_t words[kWords];
    std::memcpy(words, &header, sizeof header);
    // Who reads a word of this header sees the counts that its owner raised before.
    for (std::size_t i = 0; i < kWords; ++i) words_[i].store(words[i], std::memory_order_release);
  }
  CollectiveHeader load() const noexcept {
    std::uint64_t words[kWords];
    for (std::size_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_acquire);
    CollectiveHeader header;
    std::memcpy(&header, words, sizeof header);
    return header;
  }

 private:
  static constexpr std::size_t kWords = sizeof(CollectiveHeader) / sizeof(std::uint64_t);
  static_assert(sizeof(CollectiveHeader) % sizeof(std::uint64_t) == 0);
  std::array<std::atomic<std::uint64_t>, kWords> words_{};
};

/// How a rank's group ended before its time.
enum class FailureKind : std::uint32_t { kNone, kAborted, kPeerLost, kTimeout, kMismatch };

/// A count that only its owner raises and that others watch. On one line with its siblings: they have one writer, and a
/// watcher gets them all in one transfer.
///
/// A ticket is one chunk of one collective; tickets are numbered through all collectives of the group.
struct alignas(kCacheLine) Progress {
  std::atomic<std::uint64_t> posted{0};    ///< Collectives whose header is there.
  std::atomic<std::uint64_t> matched{0};   ///< Collectives whose headers of all ranks this rank has compared.
  std::atomic<std::uint64_t> arrived{0};   ///< Tickets for which this rank's data is there.
  std::atomic<std::uint64_t> reduced{0};   ///< Tickets whose share this rank has reduced.
  std::atomic<std::uint64_t> finished{0};  ///< Tickets that this rank has done with.
};

/// One rank's part of the control memory. Written by its owner alone, but for the bell.
struct alignas(kCacheLine) RankBlock {
  Progress progress;

  /// Rung by the others when they have raised a count while `sleeping` is set; the owner waits on it (futex).
  alignas(kCacheLine) std::atomic<std::uint32_t> bell{0};
  std::atomic<std::uint32_t> sleeping{0};

  alignas(kCacheLine) std::atomic<std::uint32_t> joined{0};  ///< The rank has mapped this memory.
  std::atomic<std::uint32_t> left{0};                        ///< The rank has given up its group in an orderly way.
  std::atomic<std::uint32_t> failure{0};  ///< FailureKind; what follows is complete before it is set.
  std::int32_t culprit{-1};               ///< The rank at fault, -1 when there is none.
  std::int32_t stack_signal{0};           ///< Makes the process write its stack; 0: nothing does.
  std::int32_t staging_fd{-1};
  std::int32_t channels_fd{-1};
  std::array<std::uint64_t, 16> cores{};  ///< CPUs the rank may run on, as a bit mask.
  std::array<char, 472> failure_text{};

  std::array<SharedHeader, kMaxOutstanding> headers{};  ///< [sequence % kMaxOutstanding]
  /// [sequence % kMaxOutstanding][piece]
  std::array<std::array<SymmetricAddress, kMaxPieces>, kMaxOutstanding> pieces{};
};

/// What a rank has called last; empty before its first call. The rank may go on meanwhile.
inline std::optional<CollectiveHeader> last_header(const RankBlock& block) noexcept {
  for (;;) {
    const std::uint64_t posted = block.progress.posted.load();
    if (posted == 0) return std::nullopt;
    const CollectiveHeader header = block.headers[(posted - 1) % kMaxOutstanding].load();
    // The next header in this place is written when kMaxOutstanding - 1 more have been posted.
    if (block.progress.posted.load() - posted < kMaxOutstanding - 1) return header;
  }
}

/// Bytes of messages from one rank to another that the receiver has not yet taken.
inline constexpr std::size_t kChannelBytes = std::size_t{256} << 10;

/// Carries messages from one rank to one other, in order: a ring of bytes. Each rank owns the channels that lead from
/// it.
struct alignas(kCacheLine) ChannelBlock {
  alignas(kCacheLine) std::atomic<std::uint64_t> written{0};  ///< By the sender, since the beginning.
  alignas(kCacheLine) std::atomic<std::uint64_t> read{0};     ///< By the receiver.
  alignas(kCacheLine) std::byte ring[kChannelBytes];
};

/// First bytes of the control memory: refuses a peer built with another layout.
struct alignas(kCacheLine) ControlHead {
  std::uint64_t layout = 0;
  std::uint32_t world_size = 0;
};

inline constexpr std::uint64_t kLayout =
    0xddb0000000000005ULL ^ (sizeof(RankBlock) << 20) ^ (kSlots << 12) ^ (kSlotBytes << 24);

inline std::size_t control_bytes(int world_size) {
  return sizeof(ControlHead) + sizeof(RankBlock) * static_cast<std::size_t>(world_size);
}

}  // namespace ddpkit::shm
