// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <functional>
#include <initializer_list>

#include <ddpkit/comm/process_group.h>

namespace ddpkit {

/// Interface of objects whose collectives join() can shadow, such as DistributedDataParallel.
class Joinable {
 public:
  virtual ~Joinable() = default;

  /// Returns the group of the ranks that join.
  virtual const ProcessGroup& join_group() const = 0;

 private:
  friend class JoinContext;

  /// Called when join() begins.
  virtual void join_begin() {}
  /// Makes the collectives of which the other ranks have notified, as `event`, on a rank without inputs.
  virtual void join_shadow(int /*event*/) {}
  /// Called when join() ends. `source` is a rank that took all steps; the others copy its state. Collective. If the
  /// loop ended with an error, `source` is negative and nothing is exchanged.
  virtual void join_end(int source) = 0;
};

/// Names and defaults are those of Python's torch.distributed.algorithms.Join.
struct JoinOptions {
  /// Divide gradients by the number of all ranks, also after some have no more inputs, so that each input has the same
  /// weight. False: divide by the number of ranks that still have inputs.
  bool divide_by_initial_world_size = true;
  /// All ranks throw as soon as the first rank has no more inputs.
  bool throw_on_early_termination = false;
};

/// Runs `loop`, a training loop whose number of steps may differ between ranks. A rank whose loop has ended shadows the
/// collectives of the other ranks with zero gradients until all loops have ended. Then every rank copies the parameters
/// and buffers of a rank that took all steps. Shadowed are the collectives of the `joinables` and those of
/// SyncBatchNorm on their group, in forward and backward.
///
///     ddpkit::join(ddp, [&] {
///       for (auto& batch : *loader) { ... }
///     });
///
/// Collective. All joinables use the same group. The loop must not use that group for other collectives. If `loop`
/// throws, the group is aborted and the exception is rethrown. Costs one small collective per shadowed collective.
void join(std::initializer_list<std::reference_wrapper<Joinable>> joinables, const std::function<void()>& loop,
          const JoinOptions& options = {});
/// The same for one object.
void join(Joinable& joinable, const std::function<void()>& loop, const JoinOptions& options = {});

}  // namespace ddpkit
