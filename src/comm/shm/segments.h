// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/shm/mapping.h"
#include "comm/shm/operation.h"
#include "comm/shm/peers.h"

namespace ddpkit::shm {

/// Memory that all ranks map, with the same segment number and the same offsets, at different addresses.
struct SymmetricSegment {
  std::uint32_t id = 0;           ///< From 1, the same on all ranks.
  std::vector<std::byte*> base;   ///< Pages of each rank, at their address in this process. [rank]
  std::size_t bytes = 0;          ///< Per rank.
  std::vector<Mapping> mappings;  ///< [rank]
};

/// Exchanged for a new symmetric segment by all-gather. A second all-gather reports errors of mapping the others'
/// pages.
struct SegmentOffer {
  std::uint64_t bytes = 0;
  std::int32_t fd = -1;
  char error[244] = {};  ///< Error message; empty: no error.
};

/// The symmetric segments of a group: finds the tensors of collectives in them.
class Segments {
 public:
  explicit Segments(const Peers& peers) : peers_(peers) {}

  // The steps of an allocation. All but add() use no state of this object.

  /// Creates a segment with the pages of this rank: `pages`, or new ones if it is empty. Writes them, or the error, to
  /// `own`.
  std::shared_ptr<SymmetricSegment> create(std::size_t bytes, Mapping::Populate populate, Mapping pages,
                                           SegmentOffer& own) const;
  /// Maps the pages of the other ranks. Writes an error of this rank to `own`. Throws CollectiveMismatch if the sizes
  /// differ, PeerLost if a rank has ended, Error if a rank offers an error. `offers`: [rank]
  void map(SymmetricSegment& segment, Mapping::Populate populate, const std::vector<SegmentOffer>& offers,
           SegmentOffer& own) const;
  /// `offers`: [rank]
  void throw_first_error(const std::vector<SegmentOffer>& offers) const;
  /// Adds a segment that all ranks have mapped.
  void add(const std::shared_ptr<SymmetricSegment>& segment);

  /// Writes the symmetric addresses of a collective's tensors. Sets the path if it does not depend on the other ranks.
  void locate(Operation& operation) const;
  /// Decides the path after the headers of all ranks have matched. Throws CollectiveMismatch if a tensor of a coalesced
  /// collective is not in a segment.
  void agree(Operation& operation) const;

 private:
  struct Located {
    SymmetricAddress address{};
    std::shared_ptr<SymmetricSegment> segment;
  };
  /// Returns the location in symmetric memory; an empty segment for private memory.
  Located locate(const void* data, std::size_t bytes) const;
  SymmetricAddress address_in(const SymmetricSegment& segment, const void* data, std::size_t bytes) const;
  std::shared_ptr<SymmetricSegment> find(std::uint32_t id) const;

  const Peers& peers_;
  std::vector<std::weak_ptr<SymmetricSegment>> segments_;
  std::uint32_t next_id_ = 1;
};

}  // namespace ddpkit::shm
