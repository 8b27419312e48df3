// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <functional>
#include <initializer_list>

#include <ddpkit/comm/process_group.h>

namespace ddpkit {

class JoinSession;

/// Something whose collectives a rank without inputs can go along with: DistributedDataParallel, for one.
class Joinable {
 public:
  virtual ~Joinable() = default;

  /// The ranks that join.
  virtual const ProcessGroup& join_group() const = 0;

 protected:
  JoinSession* join_ = nullptr;  ///< Each collective is announced to it before the call. Null outside join().
  int join_index_ = 0;           ///< The number of this object in the session.

 private:
  friend class JoinSession;

  /// Within join() from now on.
  virtual void join_begin() {}
  /// The part of a rank without inputs in the collectives that the others have announced as `event`.
  virtual void join_shadow(int /*event*/) {}
  /// No longer within join(). `source`: a rank that had inputs to the last, whose state the others take; collective.
  /// Negative when the loop ended with an error: then nothing is exchanged.
  virtual void join_end(int source) = 0;
};

/// Names and defaults of Python's torch.distributed.algorithms.Join.
struct JoinOptions {
  /// Gradients are divided by the number of ranks even after some have run out of inputs, so that each input counts
  /// alike. False: by the number of ranks that still have inputs.
  bool divide_by_initial_world_size = true;
  /// All ranks throw as soon as the first has run out of inputs.
  bool throw_on_early_termination = false;
};

/// Runs `loop`, a training loop whose number of steps may differ between ranks. A rank whose loop has ended goes along
/// with the collectives of those that still run, giving zero gradients, until all have ended; then every rank takes the
/// parameters and buffers of one that ran to the last. Shadowed are the collectives of the `joinables` and those of
/// SyncBatchNorm, in forward and backward, on their group.
///
///     ddpkit::join(ddp, [&] {
///       for (auto& batch : *loader) { ... }
///     });
///
/// Collective. All joinables are on one group; within the loop that group is used by nothing else. An exception that
/// `loop` throws ends the group and is thrown on. Costs one small collective more before each that is shadowed.
void join(std::initializer_list<std::reference_wrapper<Joinable>> joinables, const std::function<void()>& loop,
          const JoinOptions& options = {});
void join(Joinable& joinable, const std::function<void()>& loop, const JoinOptions& options = {});

}  // namespace ddpkit
