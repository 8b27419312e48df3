// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include <ddpkit/comm/arena_stats.h>

#include "comm/shm/engine.h"

namespace ddpkit {

namespace shm {
class Arena;
}

/// While it lives, this process's CPU tensors of a page and more come from memory that all ranks of a group map, as
/// far as it reaches: a gradient that autograd makes already stands where every rank can read it. Tensors outlive it.
class ArenaLease {
 public:
  /// Whether another lease is in force: a process has one at a time.
  static bool taken();

  ArenaLease(std::shared_ptr<shm::SymmetricSegment> segment, int rank, std::size_t reserve);
  ~ArenaLease();
  ArenaLease(const ArenaLease&) = delete;
  ArenaLease& operator=(const ArenaLease&) = delete;

  /// Memory of this process alone, of up to `capacity` bytes, none of it kept for empty(). Null while another lease is
  /// in force.
  static std::shared_ptr<ArenaLease> open_private(std::size_t capacity);

  /// A tensor of `numel` elements in the arena, from the part kept for the purpose if need be. Contents undefined.
  /// Throws Error when it is full.
  at::Tensor empty(std::int64_t numel, at::ScalarType dtype);
  /// Whether `data` is in the arena.
  bool contains(const void* data) const noexcept;
  ArenaStats stats() const;

 private:
  shm::Arena* arena_;  ///< Lives for ever: a tensor may be the last thing that a program lets go of.
};

}  // namespace ddpkit
