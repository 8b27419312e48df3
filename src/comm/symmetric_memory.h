// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace c10d {
struct ReduceOp;
class Work;
}  // namespace c10d

namespace ddpkit {

class ScopedArena;
namespace shm {
struct SymmetricSegment;
}

/// Memory that all ranks of a group map: collectives on it do not copy. Backend::symmetric_memory() returns it.
class SymmetricMemory {
 public:
  virtual ~SymmetricMemory() = default;
  /// Reduces dense tensors in symmetric memory in place, as one collective. Number, sizes and types of the tensors are
  /// the same on all ranks; their addresses may differ.
  virtual c10::intrusive_ptr<c10d::Work> all_reduce_coalesced(const std::vector<at::Tensor>& tensors,
                                                              const c10d::ReduceOp& op) = 0;
  /// Like all_reduce_coalesced(), but each rank only receives its shard of the sums (make_flat_layout), in `shard`:
  /// one-dimensional, dense. Padding keeps its values. When the work is complete, no rank reads `tensors` any more.
  /// `tensors` do not change.
  virtual c10::intrusive_ptr<c10d::Work> reduce_scatter_coalesced(const std::vector<at::Tensor>& tensors,
                                                                  const at::Tensor& shard,
                                                                  const c10d::ReduceOp& op) = 0;
  /// Allocates this process's large CPU tensors from memory that all ranks map, from now on. Collective. Callers share
  /// one arena. After a change of an elastic group, the arena of the former group continues with its pages. With one
  /// rank, only this process maps the memory. Returns null on all ranks if one rank cannot open it, because its process
  /// has an arena of another group or an older arena of this group that other ranks have released.
  virtual std::shared_ptr<ScopedArena> open_arena(std::size_t capacity, std::size_t reserve) = 0;
  /// Allocates `bytes` zeros per rank, which all ranks map, also after a change of an elastic group. The system
  /// allocates each page when it is first used. Collective.
  virtual std::shared_ptr<shm::SymmetricSegment> allocate_segment(std::size_t bytes) = 0;
};

}  // namespace ddpkit
