// Tier 0: the standard library only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "comm/shm/engine.h"

namespace ddpkit::shm {

/// How a collective's data travels. Known at once for private memory; for symmetric memory only when every rank's
/// header is there, since one rank with private memory makes all of them stage.
enum class Path : std::uint8_t { kUnknown, kSymmetric, kStaged };

struct Operation : Pending {
  Request request;
  CollectiveHeader header{};
  /// In symmetric memory: what holds the tensors, and where each rank's lie. [piece * world_size + rank]
  std::vector<std::shared_ptr<SymmetricSegment>> segments;
  std::vector<void*> parts;
  Path path = Path::kUnknown;
  /// Its tickets have a reduce step, after which ranks wait for each other: each reduces a slice for all, or reads what
  /// is the others'.
  bool shared_reduce = false;
  std::uint64_t first_ticket = 0;
  std::uint64_t tickets = 0;
  std::uint64_t record = 0;       ///< The flight recorder's.
  std::size_t largest_piece = 0;  ///< Elements; all-to-all: of any rank, known when the headers are matched.

  std::size_t element_size() const { return size_of(request.dtype); }
  std::size_t bytes() const { return request.numel * element_size(); }
};

/// What a rank gives the others of a new symmetric segment, in an all-gather; in a second one, whether it has theirs.
struct SegmentOffer {
  std::uint64_t bytes = 0;
  std::int32_t fd = -1;
  char error[244] = {};  ///< A sentence; empty when nothing went wrong.
};

/// Elements [begin, begin + count) of a tensor.
struct Span {
  std::size_t begin = 0;
  std::size_t count = 0;
};

/// The part of `whole` elements that rank `rank` of `ranks` reduces. Boundaries fall on cache lines, counted from the
/// start, so that two ranks never write to one line.
inline Span slice_of(std::size_t whole, std::size_t element_size, int rank, int ranks) {
  const std::size_t line = kCacheLine / element_size;
  const std::size_t lines = (whole + line - 1) / line;
  const std::size_t share = (lines + static_cast<std::size_t>(ranks) - 1) / static_cast<std::size_t>(ranks) * line;
  const std::size_t begin = std::min(whole, share * static_cast<std::size_t>(rank));
  return {begin, std::min(whole - begin, share)};
}

/// How a staging slot is divided among the pieces that a collective puts into it.
struct SlotLayout {
  std::size_t table_bytes = 0;  ///< All-to-all: the number of elements for each rank comes first.
  std::size_t pieces = 1;       ///< One for each rank where each gets something else.
  std::size_t piece_bytes = 0;  ///< Of a chunk; whole cache lines.
};

constexpr SlotLayout slot_layout(CollectiveKind kind, int world_size) {
  const auto ranks = static_cast<std::size_t>(world_size);
  const bool each_its_own =
      kind == CollectiveKind::kScatter || kind == CollectiveKind::kReduceScatter || kind == CollectiveKind::kAllToAll;
  SlotLayout layout;
  if (kind == CollectiveKind::kAllToAll)
    layout.table_bytes = (ranks * sizeof(std::uint64_t) + kCacheLine - 1) / kCacheLine * kCacheLine;
  layout.pieces = each_its_own ? ranks : 1;
  layout.piece_bytes = (kSlotBytes - layout.table_bytes) / layout.pieces / kCacheLine * kCacheLine;
  return layout;
}

/// The largest number of ranks that can use every collective.
inline constexpr int kRanksOfAllCollectives = 910;
static_assert(slot_layout(CollectiveKind::kAllToAll, kRanksOfAllCollectives).piece_bytes != 0);
/// Throws InvalidArgument if a slot has no room for each rank's piece.
void check_pieces(CollectiveKind kind, int world_size);

/// Elements of chunk `chunk` of a piece of `numel` elements; none past its end.
inline Span chunk_of(std::size_t numel, std::size_t step, std::uint64_t chunk) {
  const std::size_t begin = std::min(numel, static_cast<std::size_t>(chunk) * step);
  return {begin, std::min(numel - begin, step)};
}

/// "all_reduce(sum) of 100 float32", for messages.
std::string describe(const CollectiveHeader& header);
const char* name_of(CollectiveKind kind);

}  // namespace ddpkit::shm
