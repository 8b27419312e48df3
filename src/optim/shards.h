// Tier 2. Members of ShardedOptimizerBase: the parameters, their pieces in this rank's shards, the optimizer of the
// pieces.
#pragma once

#include <ddpkit/optim/sharded_optimizer.h>

#include <c10/util/ScopeExit.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "parallel/ddp/shard_output.h"
#include "parallel/sharding/shared_weights.h"

namespace ddpkit::optim {

/// Not moved with the optimizer, because the reducer holds its address.
struct ShardedOptimizerBase::Shards final : ShardOutput {
  Shards(const DistributedDataParallelBase& ddp, const Groups& whole_groups,
         std::unique_ptr<torch::optim::OptimizerOptions> default_options, Factory make, const ShardedOptions& choices);

  void before_first() override;
  void receive(std::size_t bucket, at::Tensor shard, const std::vector<std::uint8_t>& used) override;
  void follow_parameters() override;

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

  /// A parameter's memory when it was sharded, and the elements in this rank's shard.
  struct Place {
    FlatLayout::Range own;
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
  std::vector<at::Tensor> pieces;                  ///< Each parameter's elements in this rank's shard. [param]
  std::vector<std::vector<std::size_t>> group_of;  ///< Parameters of each group. [group][position]
  Groups groups;                                   ///< Groups of the pieces, with the options of the owner's groups.
  std::unique_ptr<torch::optim::OptimizerOptions> defaults;
  std::unique_ptr<SharedWeights> weights;  ///< Null if every rank has private weights.
  std::unique_ptr<FusedOptimizer> inner;   ///< The optimizer of the pieces.
  std::unique_ptr<FusedOptimizer> consolidated;
  bool dropped = false;  ///< zero_grad() was called since follow_active_ranks().

 private:
  at::Tensor piece_of(std::size_t index) const;
  void follow_parameter(std::size_t index);
  std::string find_error(const Groups& whole_groups);
  std::string signature() const;
  void cut(const Groups& whole_groups);
};

}  // namespace ddpkit::optim
