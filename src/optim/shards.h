// Tier 2. What ShardedOptimizerBase is made of: the parameters, this rank's slice of each, the optimizer of the slices.
#pragma once

#include <ddpkit/optim/sharded_optimizer.h>

#include <c10/util/ScopeExit.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parallel/sharding/shard.h"
#include "parallel/sharding/shared_weights.h"

namespace ddpkit::optim {

/// Stays where it is when the optimizer is moved, since the reducer knows its address.
struct ShardedOptimizerBase::Shards final : ShardOutput {
  Shards(const DistributedDataParallelBase& ddp, const Groups& whole_groups,
         std::unique_ptr<torch::optim::OptimizerOptions> default_options, Factory make, const ShardedOptions& choices);

  void begin() override;
  void receive(const std::vector<std::size_t>& received, std::vector<at::Tensor> gradients) override;
  void follow_parameters() override;

  Shard shard(std::size_t index, int rank) const {
    return shard_of(parameters[index].tensor, rank, group.world_size());
  }
  /// Until the result is destroyed, the optimizer of the slices has the owner's groups, whose options the program sets.
  auto lend_groups() {
    auto &lender = owner->param_groups(), &borrower = inner->param_groups();
    lender.swap(borrower);
    return c10::make_scope_exit([&lender, &borrower] { lender.swap(borrower); });
  }
  void drop_gradients();
  void gather_weights() const;
  /// Collective. Copies the whole state to `whole`, an optimizer of the parameters: null on all ranks except rank `to`.
  void gather_state(FusedOptimizer* whole, int to) const;
  /// Keeps this rank's part of the state of `whole`.
  void take_state(const FusedOptimizer& whole);

  /// The memory of a parameter when it was cut.
  struct Place {
    const void* data = nullptr;
    std::vector<std::int64_t> sizes, strides;

    at::Tensor empty(const at::TensorOptions& kind) const;
  };

  ShardedOptimizerBase* owner = nullptr;  ///< Whose parameter groups have the options.
  ProcessGroup group;
  ShardedOptions options;
  Factory factory;
  std::vector<NamedParameter> parameters;          ///< [param], as the reducer counts them.
  std::vector<Place> places;                       ///< [param]
  std::vector<at::Tensor> slices;                  ///< [param]
  std::vector<std::vector<std::size_t>> group_of;  ///< Parameters of each group. [group][position]
  Groups groups;                                   ///< The slices', with the options of the parameters'.
  std::unique_ptr<torch::optim::OptimizerOptions> defaults;
  std::unique_ptr<SharedWeights> weights;  ///< Null if every rank has its own.
  std::unique_ptr<FusedOptimizer> inner;   ///< Of the slices.
  std::unique_ptr<FusedOptimizer> consolidated;
  bool dropped = false;  ///< zero_grad() has been called since follow_active_ranks().
  std::function<State()> state;

 private:
  void follow_parameter(std::size_t index);
  std::string find_error(const Groups& whole_groups);
  std::string signature() const;
  void cut(const Groups& whole_groups);
};

}  // namespace ddpkit::optim
