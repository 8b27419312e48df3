// Tier 0: the standard library only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "comm/shm/control.h"
#include "kernels/dtype.h"
#include "kernels/reduce.h"

namespace ddpkit::shm {

using kernels::DataType;
using kernels::Reduction;

struct Message;
struct SymmetricSegment;

/// An operation that can be waited for.
struct Pending {
  explicit Pending(const Message* as_message = nullptr) : message(as_message) {}
  const Message* message;  ///< This object if it is a message, otherwise null.
  bool over = false;       ///< Complete except for on_finish.
  bool finished = false;
  std::exception_ptr failure = nullptr;  ///< Exception of on_finish. Only this operation has failed, not the group.

  void throw_if_failed() const {
    if (failure) std::rethrow_exception(failure);
  }
};
using PendingHandle = std::shared_ptr<Pending>;

/// The callback and the owner of the memory of a complete operation. The engine calls and releases them later, without
/// holding its mutex.
struct Due {
  PendingHandle pending;
  std::function<void()> on_finish;
  std::shared_ptr<void> keep_alive;
};

/// Marks an operation as complete except for its callback and the release of its memory, which it adds to `due`.
template <class Handle>
void complete(const Handle& pending, std::function<void()>& on_finish, std::shared_ptr<void>& keep_alive,
              std::vector<Due>& due) {
  pending->over = true;
  if (!on_finish) pending->finished = true;
  if (on_finish || keep_alive) due.push_back({pending, std::move(on_finish), std::move(keep_alive)});
}

/// Part of a coalesced collective: a dense tensor in symmetric memory.
struct CoalescedTensor {
  void* data = nullptr;
  std::size_t numel = 0;
  /// Reduce-scatter: this rank receives elements [begin, begin + count) of the sum, in `output`.
  std::size_t begin = 0, count = 0;
  void* output = nullptr;
};

/// Parameters of one collective. Pointers are to dense memory of `numel` elements each.
struct CollectiveArgs {
  CollectiveKind kind = CollectiveKind::kBarrier;
  DataType dtype = DataType::kUInt8;
  Reduction op = Reduction::kSum;               ///< All-reduce, reduce, reduce-scatter.
  int root = 0;                                 ///< Reduce, broadcast, gather, scatter.
  const void* input = nullptr;                  ///< This rank's input: one piece, or without `inputs` all pieces.
  void* output = nullptr;                       ///< Like `input`. May be the input.
  std::size_t numel = 0;                        ///< Of a piece; all-to-all: of the largest piece sent.
  std::vector<const void*> inputs = {};         ///< Scatter (root), reduce-scatter, all-to-all: for each rank. [rank]
  std::vector<void*> outputs = {};              ///< All-gather, gather (root), all-to-all: from each rank. [rank]
  std::vector<std::size_t> send_numel = {};     ///< All-to-all. [rank]
  std::vector<std::size_t> receive_numel = {};  ///< All-to-all. [rank]
  std::vector<CoalescedTensor> tensors = {};    ///< Coalesced: at most kMaxCoalesced; `numel` is their sum.
  bool monitored = false;                       ///< Barrier: a timeout has the text of c10d's monitoredBarrier.
  bool names_all = false;                       ///< If `monitored`: report all missing ranks, not only the first.
  bool recorded = true;                         ///< In the ring of events.
  std::shared_ptr<void> keep_alive = {};        ///< Owns the memory.
  std::function<void()> on_finish = {};         ///< Called once after success, before it counts as finished.

  /// Returns the piece for a rank.
  const void* input_for(std::size_t rank) const {
    return inputs.empty() ? static_cast<const std::byte*>(input) + rank * numel * size_of(dtype) : inputs[rank];
  }
  /// Returns the place of the piece from a rank.
  void* output_from(std::size_t rank) const {
    return outputs.empty() ? static_cast<std::byte*>(output) + rank * numel * size_of(dtype) : outputs[rank];
  }
};

/// How a collective's data is transferred. For private memory it is known immediately. For symmetric memory it is known
/// when the headers of all ranks are available, because one rank with private memory makes all ranks stage.
enum class Path : std::uint8_t { kUnknown, kSymmetric, kStaged };

/// How a staging slot is divided into the pieces of a collective.
struct SlotLayout {
  /// From the start of the head. All-to-all: the table of the numbers of elements is before it.
  std::size_t begin = sizeof(SlotHead);
  std::size_t pieces = 1;       ///< One per rank if the ranks receive different data.
  std::size_t piece_bytes = 0;  ///< Per chunk; a multiple of a cache line, except in the head.
};

/// `piece`: size of the largest piece, in bytes.
constexpr SlotLayout slot_layout(CollectiveKind kind, int world_size, std::size_t piece) {
  const auto ranks = static_cast<std::size_t>(world_size);
  const bool each_its_own =
      kind == CollectiveKind::kScatter || kind == CollectiveKind::kReduceScatter || kind == CollectiveKind::kAllToAll;
  SlotLayout layout;
  layout.pieces = each_its_own ? ranks : 1;
  if (kind == CollectiveKind::kAllToAll) {
    layout.begin += (ranks * sizeof(std::uint64_t) + kCacheLine - 1) / kCacheLine * kCacheLine;
  } else if (piece != 0 && piece <= sizeof(SlotHead::data) / layout.pieces) {
    return {.begin = offsetof(SlotHead, data), .pieces = layout.pieces, .piece_bytes = piece};
  }
  layout.piece_bytes = (kSlotStride - layout.begin) / layout.pieces / kCacheLine * kCacheLine;
  return layout;
}

/// A collective in progress.
struct Operation : Pending {
  CollectiveArgs args;
  CollectiveHeader header{};
  /// For symmetric memory: the segments of the tensors, and the addresses of all ranks. [piece * world_size + rank]
  std::vector<std::shared_ptr<SymmetricSegment>> segments;
  std::vector<void*> parts;
  Path path = Path::kUnknown;
  std::uint64_t call = 0;  ///< Hash of `header`.
  SlotLayout layout;       ///< If it is staged.
  /// Tickets have a reduce step, after which ranks wait for each other: each rank reduces a slice for all ranks, or
  /// reads data of the others.
  bool shared_reduce = false;
  std::uint64_t first_ticket = 0;
  std::uint64_t tickets = 0;
  std::uint64_t event = 0;        ///< Index in the ring of events.
  std::size_t largest_piece = 0;  ///< In elements; all-to-all: of any rank, known after the headers are matched.

  std::size_t element_size() const { return size_of(args.dtype); }
  std::size_t bytes() const { return args.numel * element_size(); }
};
using OperationHandle = std::shared_ptr<Operation>;

/// The elements [begin, begin + count) of a tensor.
struct Span {
  std::size_t begin = 0;
  std::size_t count = 0;
};

/// Returns the part of `whole` elements that rank `rank` of `ranks` reduces. Boundaries are multiples of a cache line
/// from the start, so two ranks never write to the same cache line.
inline Span slice_of(std::size_t whole, std::size_t element_size, int rank, int ranks) {
  const std::size_t line = kCacheLine / element_size;
  const std::size_t lines = (whole + line - 1) / line;
  const std::size_t share = (lines + static_cast<std::size_t>(ranks) - 1) / static_cast<std::size_t>(ranks) * line;
  const std::size_t begin = std::min(whole, share * static_cast<std::size_t>(rank));
  return {begin, std::min(whole - begin, share)};
}

/// The maximum number of ranks with which all collectives work.
inline constexpr int kRanksOfAllCollectives = 910;
static_assert(slot_layout(CollectiveKind::kAllToAll, kRanksOfAllCollectives, 1).piece_bytes != 0);

/// Returns the elements of chunk `chunk` of a piece of `numel` elements; none after its end.
inline Span chunk_of(std::size_t numel, std::size_t step, std::uint64_t chunk) {
  const std::size_t begin = std::min(numel, static_cast<std::size_t>(chunk) * step);
  return {begin, std::min(numel - begin, step)};
}

}  // namespace ddpkit::shm
