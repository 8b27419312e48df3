// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <memory>

#include "engine.h"

namespace ddpkit::shm {

/// How a collective's data travels. Known at once for private memory; for symmetric memory only when every rank's header
/// is there, since one rank with private memory makes all of them stage.
enum class Path : std::uint8_t { kUnknown, kSymmetric, kStaged };

struct Operation {
  Request request;
  CollectiveHeader header{};
  std::shared_ptr<SymmetricSegment> segment;  ///< Of the tensor; null for private memory.
  Path path = Path::kUnknown;
  bool shared_reduce = false;    ///< Its tickets have a reduce step: each rank reduces a slice for all.
  bool finished = false;
  std::uint64_t first_ticket = 0;
  std::uint64_t tickets = 0;

  std::size_t element_size() const { return size_of(request.dtype); }
  std::size_t bytes() const { return request.numel * element_size(); }
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

/// Elements of chunk `chunk` of a staged collective.
inline Span chunk_of(const Operation& operation, std::uint64_t chunk) {
  const std::size_t step = kSlotBytes / operation.element_size();
  const std::size_t begin = static_cast<std::size_t>(chunk) * step;
  return {begin, std::min(operation.request.numel - begin, step)};
}

/// "all_reduce(sum) of 100 float32", for messages.
std::string describe(const CollectiveHeader& header);
const char* name_of(CollectiveKind kind);

}  // namespace ddpkit::shm
