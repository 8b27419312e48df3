// Tier 0: the standard library only. Layout of the control memory, which all ranks of a group map.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include "comm/shm/process_watch.h"
#include "comm/trace/event_ring.h"

namespace ddpkit::shm {

inline constexpr std::size_t kCacheLine = 64;
/// Maximum number of collectives that a rank has posted and not all ranks have matched.
inline constexpr std::uint64_t kMaxOutstanding = 64;
/// Number of staging slots per rank, and bytes per slot. All slots fit the L2 cache. With eight slots, copying in,
/// reducing and copying out can overlap.
inline constexpr std::uint64_t kSlots = 8;
inline constexpr std::size_t kSlotBytes = std::size_t{64} << 10;
/// The head of a staging slot, which its owner writes after the data. So a reader of a small piece needs no other line
/// of shared memory than the head and the data, and of the smallest only the head.
struct alignas(kCacheLine) SlotHead {
  std::atomic<std::uint64_t> arrived{0};  ///< The ticket of the data, plus 1.
  std::atomic<std::uint64_t> call{0};     ///< CollectiveHeader::hash() of the ticket's collective.
  std::array<std::byte, kCacheLine - 2 * sizeof(std::uint64_t)> data{};  ///< The pieces, if they fit.
};
static_assert(sizeof(SlotHead) == kCacheLine);
inline constexpr std::size_t kSlotStride = sizeof(SlotHead) + kSlotBytes;
/// Maximum number of tensors in one coalesced collective.
inline constexpr std::size_t kMaxCoalesced = 64;

/// The first values of EventKind.
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
  // In-place collectives of several tensors in symmetric memory.
  kAllReduceCoalesced,
  kReduceScatterCoalesced,  ///< Each rank gets a part of the elements of all tensors.
};
static_assert(static_cast<int>(CollectiveKind::kReduceScatterCoalesced) ==
              static_cast<int>(EventKind::kReduceScatterCoalesced));

inline constexpr bool is_coalesced(CollectiveKind kind) {
  return kind == CollectiveKind::kAllReduceCoalesced || kind == CollectiveKind::kReduceScatterCoalesced;
}

/// An address in symmetric memory.
struct SymmetricAddress {
  std::uint32_t segment;  ///< 0 for private memory.
  std::uint64_t offset;   ///< In bytes; differs between ranks.
};

/// Describes a rank's call of a collective. Ranks compare all fields before `address`.
struct CollectiveHeader {
  std::uint64_t sequence;
  std::uint64_t numel;  ///< Of one piece; all-to-all: of this rank's largest piece, which may differ between ranks.
  CollectiveKind kind;
  std::uint8_t dtype;      ///< DataType
  std::uint8_t reduce_op;  ///< ReduceOp
  std::int32_t root;
  std::uint32_t tensors;       ///< Number of tensors in a coalesced collective. See RankBlock::tensor_addresses.
  std::uint64_t tensor_sizes;  ///< Hash of their numbers of elements.
  SymmetricAddress address;    ///< The tensor that the others read.

  /// Returns a hash of the fields that ranks compare.
  std::uint64_t hash() const noexcept {
    const auto small = static_cast<std::uint64_t>(kind) | std::uint64_t{dtype} << 8 | std::uint64_t{reduce_op} << 16 |
                       static_cast<std::uint64_t>(root) << 32;
    return hash_of(sequence, numel, small, tensors, tensor_sizes);
  }
};

/// A header in shared memory. Its owner overwrites it without waiting for readers. A reader may get parts of two
/// headers, and must detect this from the counts.
class SharedHeader {
 public:
  void store(const CollectiveHeader& header) noexcept {
    std::uint64_t words[kWords];
    std::memcpy(words, &header, sizeof header);
    // A reader that sees a word of this header also sees the counts that its owner raised before.
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

/// Counts that only their owner raises and that the others read. They share a cache line, because they have one writer
/// and a reader gets all of them in one transfer.
///
/// A ticket is one chunk of one collective. Tickets are numbered through all collectives of the group.
struct alignas(kCacheLine) Progress {
  std::atomic<std::uint64_t> posted{0};    ///< Collectives with a valid header.
  std::atomic<std::uint64_t> matched{0};   ///< Collectives for which this rank has compared the headers of all ranks.
  std::atomic<std::uint64_t> arrived{0};   ///< Tickets for which this rank's data is available.
  std::atomic<std::uint64_t> reduced{0};   ///< Tickets of which this rank has reduced its slice.
  std::atomic<std::uint64_t> finished{0};  ///< Tickets that this rank has completed.
};

/// The control memory of a group of the ranks that remain after a loss. See shrink().
struct GroupOffer {
  std::uint16_t number = 0;  ///< Counts the offers of one rank. 0: no offer.
  std::uint16_t world_size = 0;
  std::int32_t fd = -1;
};
static_assert(std::atomic<GroupOffer>::is_always_lock_free, "processes share it");

/// One rank's part of the control memory. Only its owner writes to it, except to `wake_word`.
struct alignas(kCacheLine) RankBlock {
  Progress progress;

  /// Other ranks increment it after they raise a count while `sleeping` is set. The owner waits on it (futex).
  alignas(kCacheLine) std::atomic<std::uint32_t> wake_word{0};
  std::atomic<std::uint32_t> sleeping{0};

  alignas(kCacheLine) std::atomic<std::uint32_t> joined{0};  ///< The rank has mapped this memory.
  std::atomic<std::uint32_t> left{0};                        ///< The rank has left its group without a failure.
  std::atomic<std::uint32_t> failure{0};  ///< FailureKind. Set after the following fields are complete.
  std::int32_t failed_rank{-1};           ///< The rank that caused the failure; -1: none.
  std::uint64_t failed_sequence{0};       ///< At the failure or the leaving, it had completed the collectives before.
  std::int32_t stack_signal{0};           ///< Signal that makes the process print its stack; 0: none.
  std::int32_t staging_fd{-1};
  std::int32_t channels_fd{-1};
  std::uint32_t has_membarrier{0};  ///< The rank has registered for membarrier(2). See Peers::start_sleep().
  LifePage life;
  std::atomic<GroupOffer> offer{GroupOffer{}};  ///< The last smaller group that this rank has offered.
  std::int32_t previous{-1};                    ///< The rank's number in the group that this one continues; -1: none.
  std::array<std::uint64_t, 16> cores{};        ///< Bit mask of the cores that the rank may use.
  std::array<char, 460> failure_text{};

  std::array<SharedHeader, kMaxOutstanding> headers{};  ///< [sequence % kMaxOutstanding]
  /// [sequence % kMaxOutstanding][tensor]
  std::array<std::array<SymmetricAddress, kMaxCoalesced>, kMaxOutstanding> tensor_addresses{};
};

/// Returns the header of the rank's last call; empty before its first call. The rank may post more calls meanwhile.
inline std::optional<CollectiveHeader> last_header(const RankBlock& block) noexcept {
  for (;;) {
    const std::uint64_t posted = block.progress.posted.load();
    if (posted == 0) return std::nullopt;
    const CollectiveHeader header = block.headers[(posted - 1) % kMaxOutstanding].load();
    // This header is overwritten after kMaxOutstanding - 1 more calls have been posted.
    if (block.progress.posted.load() - posted < kMaxOutstanding - 1) return header;
  }
}

/// Maximum bytes of messages from one rank to another that the receiver has not read.
inline constexpr std::size_t kChannelBytes = std::size_t{256} << 10;

/// Transfers messages from one rank to another, in order, in a ring buffer. Each rank owns the channels from it.
struct alignas(kCacheLine) ChannelBlock {
  alignas(kCacheLine) std::atomic<std::uint64_t> written{0};  ///< Total bytes written by the sender.
  alignas(kCacheLine) std::atomic<std::uint64_t> read{0};     ///< Total bytes read by the receiver.
  alignas(kCacheLine) std::byte ring[kChannelBytes];
};

inline constexpr std::uint64_t kNoStep = ~std::uint64_t{0};

/// First bytes of the control memory. Detects a peer built with another layout.
struct alignas(kCacheLine) ControlHead {
  std::uint64_t layout = 0;
  std::uint32_t world_size = 0;
  std::atomic<std::uint32_t> failures{0};         ///< Number of ranks that have published a failure.
  std::atomic<std::uint64_t> join_step{kNoStep};  ///< See Engine::join_step().
};

inline constexpr std::uint64_t kLayout =
    0xddb000000000000bULL ^ (sizeof(RankBlock) << 20) ^ (kSlots << 12) ^ (kSlotBytes << 24);

/// Returns the blocks of all ranks. [rank]
inline RankBlock* rank_blocks(std::byte* control) noexcept {
  return reinterpret_cast<RankBlock*>(control + sizeof(ControlHead));
}

inline std::size_t control_bytes(int world_size) {
  return sizeof(ControlHead) + sizeof(RankBlock) * static_cast<std::size_t>(world_size);
}

}  // namespace ddpkit::shm
