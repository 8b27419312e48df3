// Tier 2. Members of ShardedOptimizerBase: the parameters, this rank's slice of each parameter, the optimizer of the
// slices.
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

/// Not moved with the optimizer, because the reducer holds its address.
struct ShardedOptimizerBase::Shards final : ShardOutput {
  Shards(const DistributedDataParallelBase& ddp, const Groups& whole_groups,
         std::unique_ptr<torch::optim::OptimizerOptions> default_options, Factory make, const ShardedOptions& choices);

  void begin() override;
  void receive(const std::vector<std::size_t>& received, std::vector<at::Tensor> gradients) override;
  void follow_parameters() override;

  Shard shard(std::size_t index, int rank) const {
    return shard_of(parameters[index].tensor, rank, group.world_size());
  }
  /// Gives the inner optimizer the owner's groups, whose options the program sets, until the result is destroyed.
  auto lend_groups() {
    auto &lender = owner->param_groups(), &borrower = inner->param_groups();
    lender.swap(borrower);
    return c10::make_scope_exit([&lender, &borrower] { lender.swap(borrower); });
  }
  void drop_gradients();
  void gather_weights() const;
  /// Collective. Copies the whole state to `whole`, an optimizer of all parameters. `whole` is null on all ranks except
  /// rank `to`.
  void gather_state(FusedOptimizer* whole, int to) const;
  /// Copies this rank's part of the state of `whole`.
  void take_state(const FusedOptimizer& whole);

  /// A parameter's memory when it was sharded.
  struct Place {
    const void* data = nullptr;
    std::vector<std::int64_t> sizes, strides;

    at::Tensor empty(const at::TensorOptions& kind) const;
  };

  ShardedOptimizerBase* owner = nullptr;  ///< Its parameter groups have the options.
  ProcessGroup group;
  ShardedOptions options;
  Factory factory;
  std::vector<NamedParameter> parameters;          ///< [param], in the order of the reducer.
  std::vector<Place> places;                       ///< [param]
  std::vector<at::Tensor> slices;                  ///< [param]
  std::vector<std::vector<std::size_t>> group_of;  ///< Parameters of each group. [group][position]
  Groups groups;                                   ///< Groups of the slices, with the options of the owner's groups.
  std::unique_ptr<torch::optim::OptimizerOptions> defaults;
  std::unique_ptr<SharedWeights> weights;  ///< Null if every rank has private weights.
  std::unique_ptr<FusedOptimizer> inner;   ///< The optimizer of the slices.
  std::unique_ptr<FusedOptimizer> consolidated;
  bool dropped = false;  ///< zero_grad() was called since follow_active_ranks().
  std::function<State()> state;

 private:
  void follow_parameter(std::size_t index);
  std::string find_error(const Groups& whole_groups);
  std::string signature() const;
  void cut(const Groups& whole_groups);
};

}  // namespace ddpkit::optim
