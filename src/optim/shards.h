// Tier 2: torch/optim/optimizer.h.
#pragma once

#include <c10/util/ScopeExit.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/parallel/join.h>
#include <ddpkit/parallel/reducer.h>

#include "optim/fused_optimizer.h"
#include "optim/shard_memory.h"
#include "parallel/ddp/shard_output.h"
#include "parallel/sharding/parameter_shards.h"
#include "parallel/sharding/shared_weights.h"

namespace ddpkit::optim {

class ShardedOptimizerBase;

/// The state of a ShardedOptimizer: the parameters, their pieces in this rank's shards, the optimizer of the pieces.
/// Not moved with the ShardedOptimizer, because the reducer holds its address.
class Shards final : public ShardOutput {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  using Factory = std::function<std::unique_ptr<FusedOptimizer>(const Groups& groups)>;

  /// Collective. See ShardedOptimizer and ShardedOptions.
  Shards(const Reducer& reducer, ProcessGroup process_group, const Groups& whole_groups,
         std::unique_ptr<torch::optim::OptimizerOptions> default_options, Factory make, bool shared_weights,
         bool updates_in_backward);
  static Shards& of(const ShardedOptimizerBase& optimizer) noexcept;

  void before_first() override;
  void receive(std::size_t bucket, at::Tensor shard, const std::vector<std::uint8_t>& used) override;
  void follow_parameters() override;
  bool survives_loss() const noexcept override { return memory != nullptr; }
  /// A new object takes the place of this one in the owner.
  void regroup(const Reducer& reducer, int new_ranks) override;

  /// Gives the inner optimizer the owner's groups, whose options the program sets, until the result is destroyed.
  auto lend_groups() {
    auto &lender = owner->param_groups(), &borrower = inner->param_groups();
    lender.swap(borrower);
    return c10::make_scope_exit([&lender, &borrower] { lender.swap(borrower); });
  }
  /// Throws InvalidArgument if the owner's parameter groups have changed.
  void check_groups() const;
  /// Updates the weights of this rank's shards from the gradients of the pieces times `factor`.
  void update(double factor);
  /// With `memory`: call it before update(). What update() changes is undone if regroup() comes before commit().
  void begin_update();
  /// Call it when all ranks have completed update(). Copies the updated pieces of all ranks to the parameters.
  void commit();
  void drop_gradients();
  void gather_weights() const;
  /// Collective. Copies the whole state to `whole`, an optimizer of all parameters. `whole` is null on all ranks except
  /// rank `to`.
  void gather_state(FusedOptimizer* whole, int to) const;
  /// Creates an optimizer of the whole parameters, without state. Not collective.
  std::unique_ptr<FusedOptimizer> make_whole() const;
  /// Copies this rank's part of the state, and the options, from an optimizer of the whole parameters. Not collective.
  void take_state(const FusedOptimizer& whole);

  /// Collective. Called within join() by ranks without inputs. These ranks copy the settings that the active ranks have
  /// changed. `arguments`: of the active ranks' call. Returns the active ranks' arguments on all ranks.
  std::vector<double> follow_active_ranks(std::vector<double> arguments = {});
  /// Returns the options of all groups and `arguments` as an archive.
  std::string settings(const std::vector<double>& arguments) const;
  /// Copies the options. Returns the arguments.
  std::vector<double> take_settings(const std::string& bytes);

  /// A parameter's memory when it was sharded, and the elements in this rank's shard.
  struct Place {
    FlatLayout::Range own;
    const void* data = nullptr;
    std::vector<std::int64_t> sizes, strides;

    at::Tensor empty(const at::TensorOptions& kind) const;
  };

  torch::optim::Optimizer* owner = nullptr;  ///< Its parameter groups have the options.
  const Joinable* joinable = nullptr;        ///< The owner.
  ProcessGroup group;
  bool update_in_backward;
  Factory factory;
  std::vector<NamedParameter> parameters;          ///< [param], in the order of the reducer.
  std::vector<Place> places;                       ///< [param]
  std::vector<at::Tensor> pieces;                  ///< Each parameter's elements in this rank's shard. [param]
  std::vector<std::vector<std::size_t>> group_of;  ///< Parameters of each group. [group][position]
  Groups groups;                                   ///< Groups of the pieces, with the options of the owner's groups.
  std::unique_ptr<torch::optim::OptimizerOptions> defaults;
  std::unique_ptr<SharedWeights> weights;    ///< Null if every rank has private weights.
  std::shared_ptr<ParameterShards> sharded;  ///< Null if every rank has whole weights.
  /// The pieces and the state, if the ranks can continue after the loss of one. Null: the pieces are in the parameters.
  std::shared_ptr<ShardMemory> memory;
  std::unique_ptr<FusedOptimizer> inner;  ///< The optimizer of the pieces.
  std::unique_ptr<FusedOptimizer> consolidated;
  bool dropped = false;  ///< zero_grad() was called since follow_active_ranks().

 private:
  at::Tensor piece_of(std::size_t index) const;
  void follow_parameter(std::size_t index);
  std::string find_error(const Groups& whole_groups, bool shared_weights);
  std::string signature(bool shared_weights) const;
  bool can_survive_loss(bool shared_weights) const;
  void cut(const Groups& whole_groups);
  Groups whole_groups() const;

  // shards_ranks.cpp
  void make_memory();
  std::vector<at::Tensor> pieces_in_memory() const;
  void undo_states();
  void copy_state(int rank, const Shards& from) const;

  std::vector<std::size_t> memory_offsets_;  ///< Of a bucket's shard, in ShardMemory::weights(). [bucket]
  struct StateBefore {
    std::int64_t steps = 0;
    Algorithm::StateTensors tensors;  ///< Only which of them are defined matters.
  };
  /// Before the update that is not complete. Empty: no state. [param]
  std::optional<std::vector<std::optional<StateBefore>>> states_before_;
  std::vector<std::uint8_t> is_updated_;  ///< Whether a parameter has a gradient in this update. [param]
};

}  // namespace ddpkit::optim
