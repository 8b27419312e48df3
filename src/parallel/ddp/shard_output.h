// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/parallel/bucket_plan.h>

#include "tensor/flat_layout.h"

namespace ddpkit {

class ParameterShards;
class Reducer;

/// Returns the parameters with requires_grad, with the indices of Reducer::buckets(). Dense parameters come first.
/// [param]
const std::vector<NamedParameter>& parameters_of(const Reducer& reducer);

/// Returns the shards of the parameters. Null if each rank has whole parameters.
std::shared_ptr<ParameterShards> parameter_shards_of(const Reducer& reducer);

/// Returns the ranks that share a model. All ranks, unless there are replicas (HSDP).
const ProcessGroup& shard_group_of(const Reducer& reducer);

/// Receives shards of the averaged gradients from a Reducer. The parameters then have no gradient.
struct ShardOutput {
  enum class State {
    kActive,
    kReplaced,   ///< The reducer has a newer output.
    kNoReducer,  ///< The reducer has been destroyed, or a newer reducer averages its parameters.
  };
  virtual ~ShardOutput() = default;

  /// Sets `plan` and `layouts`. Collective; must not be called within backward. Throws InvalidArgument for sparse
  /// gradients and with a communication hook.
  void make_plan(const Reducer& reducer);
  /// Call after make_plan(). From the next backward on, each rank receives only its shard of each bucket (a
  /// reduce-scatter), which is passed to `output` immediately. Replaces an earlier output. The reducer does not own the
  /// output: after its destruction, the next forward pass or backward uses all-reduce again. Collective.
  static void attach(const std::shared_ptr<ShardOutput>& output, const Reducer& reducer);

  /// Called when a forward pass begins. The parameters' memory may have changed since the last forward pass. Not
  /// collective.
  virtual void follow_parameters() = 0;
  /// Called before the first bucket of a backward is reduced, at the same position in the order of collectives on all
  /// ranks.
  virtual void before_first() = 0;
  /// Called when a bucket has been reduced on all ranks, in the order of the buckets. `shard`: this rank's shard of the
  /// averaged gradients, as in `layouts`; the values of padding are undefined. `used`: whether any rank has used the
  /// parameter. The gradients of unused parameters are undefined. [position]
  virtual void receive(std::size_t bucket, at::Tensor shard, const std::vector<std::uint8_t>& used) = 0;

  /// Returns whether the ranks that remain have the state of a lost rank.
  virtual bool survives_loss() const noexcept { return false; }
  /// Continues with the reducer of the remaining ranks and of `new_ranks` new ones, the last ones. Only if
  /// survives_loss(). Collective. If it throws, nothing changes.
  virtual void regroup(const Reducer& /*reducer*/, int /*new_ranks*/) {}

  BucketPlan plan;                  ///< The reducer does not rebuild these buckets.
  std::vector<FlatLayout> layouts;  ///< Gradients are in memory order of the parameters. [bucket]
  std::function<State()> state;     ///< Set by attach().
};

}  // namespace ddpkit
