// Tier 1: ddpkit/comm/process_group.h. New ranks of an elastic group.
#pragma once

#include <cstdint>

#include <ddpkit/comm/process_group.h>

namespace ddpkit {

/// Lets new ranks, which the launcher has started instead of lost ones, join an elastic group between two steps.
///
/// A new rank is alone until it has built its model. Then it asks for admission through the store of the launcher. The
/// launcher reports to the other ranks that somebody waits. Rank 0 chooses a step, in memory that all ranks share.
/// Before that step, all ranks connect with the new ones as a new group. If a new rank is lost meanwhile, the others
/// continue in the former group.
class Joining {
 public:
  /// Makes `group`, which has one rank, the group of a new rank that waits. Its number in messages is `name`.
  static void begin(const ProcessGroup& group, int name);
  /// Returns whether new ranks join before the step with this number. Returns the same on all ranks if each step has a
  /// collective. Does not communicate, except on rank 0 while new ranks wait.
  static bool is_due(const ProcessGroup& group, std::uint64_t step);
  /// Lets the new ranks join. Collective of the former ranks. Without a new rank that came, only counts a change of the
  /// group. Throws PeerLost if a former rank is lost.
  static Regroup admit(const ProcessGroup& group);
  /// On a new rank: waits until the others let it join. Throws Error if they end before.
  static Regroup join(const ProcessGroup& group);
  /// The last `new_ranks` ranks of the group receive the values of `tensor`, a dense one, from former ranks. Call on
  /// all ranks; the former ranks share the work.
  static void copy(const ProcessGroup& group, int new_ranks, const at::Tensor& tensor);
};

}  // namespace ddpkit
