// Tier 0: the standard library only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "comm/shm/engine.h"

namespace ddpkit::shm {

/// How a collective's data is transferred. For private memory it is known immediately. For symmetric memory it is known
/// when the headers of all ranks are available, because one rank with private memory makes all ranks stage.
enum class Path : std::uint8_t { kUnknown, kSymmetric, kStaged };

struct Operation : Pending {
  Request request;
  CollectiveHeader header{};
  /// For symmetric memory: the segments of the tensors, and the addresses of all ranks. [piece * world_size + rank]
  std::vector<std::shared_ptr<SymmetricSegment>> segments;
  std::vector<void*> parts;
  Path path = Path::kUnknown;
  /// Tickets have a reduce step, after which ranks wait for each other: each rank reduces a slice for all ranks, or
  /// reads data of the others.
  bool shared_reduce = false;
  std::uint64_t first_ticket = 0;
  std::uint64_t tickets = 0;
  std::uint64_t record = 0;       ///< Index in the flight recorder.
  std::size_t largest_piece = 0;  ///< In elements; all-to-all: of any rank, known after the headers are matched.

  std::size_t element_size() const { return size_of(request.dtype); }
  std::size_t bytes() const { return request.numel * element_size(); }
};

/// Exchanged for a new symmetric segment by all-gather. A second all-gather reports errors of mapping the others'
/// pages.
struct SegmentOffer {
  std::uint64_t bytes = 0;
  std::int32_t fd = -1;
  char error[244] = {};  ///< Error message; empty: no error.
};

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

/// How a staging slot is divided into the pieces of a collective.
struct SlotLayout {
  std::size_t table_bytes = 0;  ///< All-to-all: size of the table of the numbers of elements, which comes first.
  std::size_t pieces = 1;       ///< One per rank if the ranks receive different data.
  std::size_t piece_bytes = 0;  ///< Per chunk; a multiple of a cache line.
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

/// The maximum number of ranks with which all collectives work.
inline constexpr int kRanksOfAllCollectives = 910;
static_assert(slot_layout(CollectiveKind::kAllToAll, kRanksOfAllCollectives).piece_bytes != 0);
/// Throws InvalidArgument if a slot is too small for one piece per rank.
void check_pieces(CollectiveKind kind, int world_size);

/// Returns the elements of chunk `chunk` of a piece of `numel` elements; none after its end.
inline Span chunk_of(std::size_t numel, std::size_t step, std::uint64_t chunk) {
  const std::size_t begin = std::min(numel, static_cast<std::size_t>(chunk) * step);
  return {begin, std::min(numel - begin, step)};
}

/// Returns text such as "all_reduce(sum) of 100 float32", for messages.
std::string describe(const CollectiveHeader& header);
const char* name_of(CollectiveKind kind);

}  // namespace ddpkit::shm
