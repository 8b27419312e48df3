// Tier 0: the standard library only.
#pragma once

#include <vector>

#include "comm/shm/control.h"

namespace ddpkit::shm {

/// The ranks of a group, in the control memory that one of them has mapped.
class Peers {
 public:
  /// `blocks` and `pids`: of all ranks. [rank] `first_rank`: the number of rank 0 in errors, if the group is a part of
  /// a larger one.
  Peers(RankBlock* blocks, int rank, std::vector<int> pids, int first_rank)
      : rank_(rank), first_rank_(first_rank), pids_(std::move(pids)), blocks_(blocks) {}

  int rank() const noexcept { return rank_; }
  int world_size() const noexcept { return static_cast<int>(pids_.size()); }
  int pid(int rank) const noexcept { return pids_[static_cast<std::size_t>(rank)]; }
  /// Returns the rank's number for messages.
  int named(int rank) const noexcept { return first_rank_ + rank; }
  RankBlock& block(int rank) const noexcept { return blocks_[rank]; }

 private:
  const int rank_;
  const int first_rank_;
  const std::vector<int> pids_;  ///< [rank]
  RankBlock* const blocks_;      ///< [rank]
};

}  // namespace ddpkit::shm
