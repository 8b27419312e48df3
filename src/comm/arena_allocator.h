// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include <ddpkit/comm/arena_stats.h>

#include "comm/shm/segments.h"

namespace ddpkit {

namespace shm {
class Arena;
}

/// While an arena exists, this process's CPU tensors of a page and more are allocated from memory that all ranks of a
/// group map, up to its capacity. Gradients are then readable by every rank. Tensors may outlive the arena.
class ScopedArena {
 public:
  /// Returns whether an arena is active. A process has at most one.
  static bool taken();

  ScopedArena(std::shared_ptr<shm::SymmetricSegment> segment, int rank, std::size_t reserve);
  ~ScopedArena();
  ScopedArena(const ScopedArena&) = delete;
  ScopedArena& operator=(const ScopedArena&) = delete;

  /// Opens an arena of up to `capacity` bytes that only this process uses, without a reserve for empty(). Returns null
  /// if another arena is active.
  static std::shared_ptr<ScopedArena> open_private(std::size_t capacity);

  /// Returns this rank's pages, which a later group may use; without a descriptor, only this process may.
  shm::Mapping pages() const;
  /// Continues in a segment of a later group with these pages. All tensors remain.
  void move_to(std::shared_ptr<shm::SymmetricSegment> segment, int rank) noexcept;

  /// Allocates a tensor of `numel` elements in the arena, if necessary from the reserve. The content is undefined.
  /// Throws Error if the arena is full.
  at::Tensor empty(std::int64_t numel, at::ScalarType dtype);
  /// Returns whether `data` is in the arena.
  bool contains(const void* data) const noexcept;
  ArenaStats stats() const;

 private:
  shm::Arena* arena_;  ///< Never destroyed: tensors may be freed at any time until the program ends.
};

}  // namespace ddpkit
