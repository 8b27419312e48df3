// Tier 0: the standard library only. Moves the bytes of one ticket: through the staging slots, or in place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "comm/shm/operation.h"

namespace ddpkit::shm {

/// The staging slots of all ranks.
struct Staging {
  int rank = 0;                   ///< This rank.
  std::vector<std::byte*> slots;  ///< kSlots of kSlotStride bytes each. [rank]
  std::vector<void*> parts;       ///< Scratch: addresses of the ranks' parts of a reduction. [rank]

  int world_size() const noexcept { return static_cast<int>(slots.size()); }
  SlotHead& head(int of, std::uint64_t ticket) const noexcept {
    return *reinterpret_cast<SlotHead*>(slots[static_cast<std::size_t>(of)] + ticket % kSlots * kSlotStride);
  }
  /// Returns the data after the head.
  std::byte* slot(int of, std::uint64_t ticket) const noexcept {
    return reinterpret_cast<std::byte*>(&head(of, ticket) + 1);
  }
  /// Returns the piece with this number.
  std::byte* piece(int of, std::uint64_t ticket, const SlotLayout& layout, std::size_t number) const noexcept {
    return reinterpret_cast<std::byte*>(&head(of, ticket)) + layout.begin + number * layout.piece_bytes;
  }
};

/// Copies this rank's data of a staged ticket to its slot.
void copy_in(const Staging& staging, const Operation& operation, std::uint64_t ticket);
/// Reduces this rank's slice of a ticket for all ranks. In symmetric memory: this rank's part of the collective, whose
/// tensors all ranks read and write in place.
void reduce_slice(Staging& staging, const Operation& operation, std::uint64_t ticket);
/// Copies the result of a staged ticket out. Copies this rank's data of ticket `along` in at the same time.
void copy_out(Staging& staging, const Operation& operation, std::uint64_t ticket, std::optional<std::uint64_t> along);

}  // namespace ddpkit::shm
