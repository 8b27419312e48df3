// Tier 1: ATen/core/Tensor.h. What the ranks of a host keep of a sharded optimizer after the loss of one of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <tuple>
#include <unordered_map>
#include <vector>

#include <ddpkit/comm/process_group.h>

#include "comm/shm/arena.h"
#include "optim/algorithm.h"

namespace ddpkit::optim {

/// Memory for the pieces of weights and the state of a rank's shards. All ranks of the host map it, so the shards of a
/// lost rank remain. An update may stop anywhere: it first saves each block of the state, so that it can be undone.
///
/// Not thread-safe, except Algorithm::UndoLog::save() on different blocks.
class ShardMemory {
 public:
  /// Returns whether the group can continue after the loss of a rank, and its ranks map common memory.
  static bool possible(const ProcessGroup& group);

  /// Collective. `numels`: elements of the whole parameters. [param] `weight_bytes`: of one rank's pieces of all
  /// parameters. `state_bytes`: upper limit of one tensor of state per parameter.
  ShardMemory(const ProcessGroup& group, const std::vector<std::int64_t>& numels, std::size_t weight_bytes,
              std::size_t state_bytes);

  /// Returns the memory of a rank for its pieces.
  std::byte* weights(int rank) const { return fixed_->base[static_cast<std::size_t>(rank)] + weights_offset_; }
  /// `pieces`: this rank's. [param]
  void set_pieces(const std::vector<at::Tensor>& pieces);

  // State of this rank. `piece`: one of set_pieces().

  /// Allocates zeros for the state, and as much memory for saved blocks. Throws Error if there is no memory.
  at::Tensor zeros(std::int64_t numel, at::ScalarType dtype);
  /// Lets the other ranks find the state of a piece, which is in memory from zeros().
  void place(const at::Tensor& piece, const Algorithm::StateTensors& tensors) noexcept;
  /// Returns the log for the next update of a piece. Call place() before.
  Algorithm::UndoLog undo_log(const at::Tensor& piece, const Algorithm::StateTensors& tensors);
  /// All ranks have completed the update.
  void commit() noexcept { ++update_; }
  /// Call it before and after the state is replaced, as by load().
  void note_replacement() noexcept { ++header(rank_).replacements; }

  /// Returns a rank's state of a piece. Throws Error if it has none.
  std::byte* state(int rank, std::size_t param, std::size_t kind) const;
  /// Copies elements [begin, begin + count) of it, without an update that has not been committed. Throws Error if the
  /// rank was lost while it replaced its state.
  void copy_state(int rank, std::size_t param, std::size_t kind, std::int64_t begin, std::int64_t count,
                  std::size_t element_size, std::byte* to) const;

 private:
  static constexpr std::size_t kKinds = std::tuple_size_v<Algorithm::StateTensors>;

  struct Header {
    std::atomic<std::uint64_t> replacements;  ///< Odd while the state is replaced.
  };
  /// Offsets in the memory for state. 0: none.
  struct Place {
    std::uint64_t state = 0, saved = 0;
  };

  Header& header(int rank) const { return *reinterpret_cast<Header*>(fixed_->base[static_cast<std::size_t>(rank)]); }
  Place& place_of(int rank, std::size_t param, std::size_t kind) const;
  std::atomic<std::uint64_t>* log_of(int rank, std::size_t param) const;

  int rank_;
  std::uint64_t update_ = 1;                               ///< Number of the next update, or of the one in progress.
  std::unordered_map<const void*, std::size_t> index_of_;  ///< Of the pieces.
  std::vector<std::size_t> first_block_;                   ///< In the log. [param]
  std::size_t places_offset_, log_offset_ = 0, weights_offset_ = 0;
  std::shared_ptr<shm::SymmetricSegment> fixed_;  ///< Header, places, log, pieces.
  std::shared_ptr<shm::SymmetricSegment> state_;
  std::shared_ptr<shm::Arena> arena_;  ///< Of this rank's state.
};

}  // namespace ddpkit::optim
