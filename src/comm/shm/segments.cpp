#include "comm/shm/segments.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/shm/diagnostics.h"

namespace ddpkit::shm {
namespace {

/// A smaller tensor is staged even if it is in symmetric memory: staging needs one exchange, a reduction in place two,
/// and the additional copy of a small tensor costs little.
constexpr std::size_t kStageBelow = std::size_t{4} << 10;

struct Extent {
  const void* data = nullptr;  ///< Null: none.
  std::size_t bytes = 0;
};

/// Returns the dense tensor that the other ranks read in place if it is in symmetric memory.
Extent given_to_others(const Operation& operation, int ranks) {
  const CollectiveArgs& args = operation.args;
  const std::size_t piece = operation.bytes();
  if (piece < kStageBelow) return {};
  switch (args.kind) {
    case CollectiveKind::kAllReduce:
      return args.input == args.output ? Extent{args.input, piece} : Extent{};
    case CollectiveKind::kBroadcast:
      return {args.output, piece};
    case CollectiveKind::kAllGather:
      return {args.input, piece};
    case CollectiveKind::kReduceScatter:
      for (std::size_t r = 0; r < args.inputs.size(); ++r) {
        if (args.inputs[r] != static_cast<const std::byte*>(args.inputs[0]) + r * piece) return {};
      }
      return {args.input_for(0), piece * static_cast<std::size_t>(ranks)};
    default:
      return {};
  }
}

void write_error(SegmentOffer& offer, const Error& error) {
  fmt::format_to_n(offer.error, sizeof offer.error - 1, "{}", error.what());
}

}  // namespace

std::shared_ptr<SymmetricSegment> Segments::create(std::size_t bytes, Mapping::Populate populate, Mapping pages,
                                                   SegmentOffer& own) const {
  auto segment = std::make_shared<SymmetricSegment>();
  segment->bytes = bytes;
  segment->mappings.resize(static_cast<std::size_t>(peers_.world_size()));
  own.bytes = bytes;
  try {
    Mapping& mapping = segment->mappings[static_cast<std::size_t>(peers_.rank())];
    mapping =
        pages.data() ? std::move(pages) : Mapping::create(fmt::format("segment-{}", peers_.rank()), bytes, populate);
    own.fd = mapping.descriptor();
  } catch (const Error& error) {
    write_error(own, error);
  }
  return segment;
}

void Segments::map(SymmetricSegment& segment, Mapping::Populate populate, const std::vector<SegmentOffer>& offers,
                   SegmentOffer& own) const {
  for (int r = 0; r < peers_.world_size(); ++r) {
    const std::size_t theirs = offers[static_cast<std::size_t>(r)].bytes;
    if (theirs == segment.bytes) continue;
    throw CollectiveMismatch(
        fmt::format("allocate: rank {} asked for {} bytes of symmetric memory, rank {} for {}", peers_.named(0),
                    offers[0].bytes, peers_.named(r == 0 ? peers_.rank() : r), r == 0 ? segment.bytes : theirs),
        {.rank = peers_.named(r)});
  }
  throw_first_error(offers);
  try {
    for (int r = 0; r < peers_.world_size(); ++r) {
      const auto index = static_cast<std::size_t>(r);
      if (r != peers_.rank()) segment.mappings[index] = peers_.open(r, offers[index].fd, segment.bytes, populate);
      segment.base.push_back(segment.mappings[index].data());
    }
  } catch (const PeerLost&) {
    throw;  // The rank may have taken part in the next exchange before it ended, so the group must fail.
  } catch (const Error& error) {
    write_error(own, error);
  }
}

void Segments::throw_first_error(const std::vector<SegmentOffer>& offers) const {
  for (std::size_t r = 0; r < offers.size(); ++r) {
    const int rank = peers_.named(static_cast<int>(r));
    if (offers[r].error[0])
      throw Error(fmt::format("rank {}: {}", rank, offers[r].error), {.rank = rank, .call = "allocate"});
  }
}

void Segments::add(const std::shared_ptr<SymmetricSegment>& segment) {
  segment->id = next_id_++;
  std::erase_if(segments_, [](const auto& old) { return old.expired(); });
  segments_.push_back(segment);
}

Segments::Located Segments::locate(const void* data, std::size_t bytes) const {
  for (const auto& candidate : segments_) {
    auto segment = candidate.lock();
    if (!segment) continue;
    const SymmetricAddress address = address_in(*segment, data, bytes);
    if (address.segment != 0) return {address, std::move(segment)};
  }
  return {};
}

SymmetricAddress Segments::address_in(const SymmetricSegment& segment, const void* data, std::size_t bytes) const {
  const auto* begin = static_cast<const std::byte*>(data);
  const std::byte* base = segment.base[static_cast<std::size_t>(peers_.rank())];
  if (begin < base || begin + bytes > base + segment.bytes) return {};
  return {.segment = segment.id, .offset = static_cast<std::uint64_t>(begin - base)};
}

std::shared_ptr<SymmetricSegment> Segments::find(std::uint32_t id) const {
  for (const auto& candidate : segments_) {
    if (auto segment = candidate.lock(); segment && segment->id == id) return segment;
  }
  return nullptr;
}

void Segments::locate(Operation& operation) const {
  const CollectiveArgs& args = operation.args;
  operation.largest_piece = args.numel;
  if (is_coalesced(args.kind)) {
    auto& addresses = peers_.block(peers_.rank()).tensor_addresses[operation.header.sequence % kMaxOutstanding];
    for (std::size_t i = 0; i < args.tensors.size(); ++i) {
      const CoalescedTensor& tensor = args.tensors[i];
      const std::size_t bytes = tensor.numel * operation.element_size();
      addresses[i] = {};
      for (std::size_t k = 0; k < operation.segments.size() && addresses[i].segment == 0; ++k)
        addresses[i] = address_in(*operation.segments[k], tensor.data, bytes);
      if (addresses[i].segment != 0) continue;
      auto located = locate(tensor.data, bytes);
      addresses[i] = located.address;
      if (located.segment) operation.segments.push_back(std::move(located.segment));
    }
    return;
  }
  if (const Extent given = given_to_others(operation, peers_.world_size()); given.data) {
    auto located = locate(given.data, given.bytes);
    operation.header.address = located.address;
    if (located.segment) {
      operation.segments.push_back(std::move(located.segment));
      return;
    }
  }
  if (args.kind != CollectiveKind::kAllToAll) operation.path = Path::kStaged;
}

void Segments::agree(Operation& operation) const {
  const CollectiveArgs& args = operation.args;
  const auto ranks = static_cast<std::size_t>(peers_.world_size());
  const std::uint64_t index = operation.header.sequence % kMaxOutstanding;
  for (int r = 0; r < peers_.world_size(); ++r)
    operation.largest_piece =
        std::max(operation.largest_piece, static_cast<std::size_t>(peers_.block(r).headers[index].load().numel));
  const bool coalesced = is_coalesced(args.kind);
  const std::size_t pieces = coalesced ? args.tensors.size() : 1;
  operation.path = Path::kSymmetric;
  operation.parts.resize(pieces * ranks);
  for (std::size_t p = 0; p < pieces; ++p) {
    const std::size_t bytes = coalesced ? args.tensors[p].numel * operation.element_size()
                                        : given_to_others(operation, peers_.world_size()).bytes;
    for (std::size_t r = 0; r < ranks; ++r) {
      const RankBlock& theirs = peers_.block(static_cast<int>(r));
      const SymmetricAddress address =
          coalesced ? theirs.tensor_addresses[index][p] : theirs.headers[index].load().address;
      // One tensor: symmetric if it is in the same segment on all ranks, so all ranks decide the same.
      const bool known = coalesced ? address.segment != 0 : address.segment == operation.header.address.segment;
      const SymmetricSegment* holder = nullptr;
      for (const auto& held : operation.segments) {
        if (known && held->id == address.segment) holder = held.get();
      }
      if (known && !holder) {
        if (auto found = find(address.segment)) {
          holder = found.get();
          operation.segments.push_back(std::move(found));
        }
      }
      const bool fits = holder && address.offset <= holder->bytes && bytes <= holder->bytes - address.offset;
      if (!fits && coalesced)
        throw CollectiveMismatch(
            fmt::format("{} (number {}): tensor {} of rank {} is not in memory that rank {} maps", name_of(args.kind),
                        operation.header.sequence, p, peers_.named(static_cast<int>(r)), peers_.named(peers_.rank())),
            {.rank = peers_.named(static_cast<int>(r))});
      if (!fits) {
        operation.path = Path::kStaged;
        return;
      }
      operation.parts[p * ranks + r] = holder->base[r] + address.offset;
    }
  }
}

}  // namespace ddpkit::shm
