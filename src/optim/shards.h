// Tier 2. What ShardedOptimizerBase is made of:
//   shards.cpp             slices of parameters, checks, memory
//   sharded_optimizer.cpp  ownership, backward, step
//   sharded_state.cpp      the state of all ranks put together, and archives
//   sharded_join.cpp       ranks that have run out of inputs
#pragma once

#include <ddpkit/optim/sharded_optimizer.h>

#include <memory>
#include <string>
#include <vector>

#include "parallel/sharding/shard.h"
#include "parallel/sharding/shared_weights.h"

namespace ddpkit::optim {

/// A dense tensor's elements in the order of their memory.
inline at::Tensor in_order(const at::Tensor& tensor) { return tensor.detach().as_strided({tensor.numel()}, {1}); }

inline Shard shard_on(const at::Tensor& tensor, const ProcessGroup& group, int rank) {
  return shard_of(tensor.numel(), tensor.element_size(), rank, group.world_size());
}

/// While it lives, the optimizer of the slices has the parameter groups of the whole one, whose options the program
/// sets.
class LentGroups {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  LentGroups(Groups& lender, Groups& borrower) : lender_(lender), borrower_(borrower) { lender_.swap(borrower_); }
  ~LentGroups() { lender_.swap(borrower_); }
  LentGroups(const LentGroups&) = delete;
  LentGroups& operator=(const LentGroups&) = delete;

 private:
  Groups& lender_;
  Groups& borrower_;
};

/// The parameters, this rank's slice of each, and the optimizer of the slices. Stays where it is when the optimizer is
/// moved, since the reducer knows its address.
struct ShardedOptimizerBase::Shards final : GradientSink {
  enum JoinEvent : int { kStep, kClip };

  Shards(DistributedDataParallelBase& ddp, const Groups& whole_groups,
         std::unique_ptr<torch::optim::OptimizerOptions> default_options, Factory make, const ShardedOptions& choices);

  void begin() override;
  void receive(const std::vector<std::size_t>& received, std::vector<at::Tensor> gradients) override;
  void follow_parameters() override;

  void follow_parameter(std::size_t index);
  std::string find_error(const Groups& whole_groups);
  std::string signature() const;
  void cut(const Groups& whole_groups);
  void drop_gradients();
  void gather_weights() const;
  torch::optim::OptimizerParamState* state_of(std::size_t index) const;

  /// The memory of a parameter when it was cut.
  struct Place {
    const void* data = nullptr;
    std::vector<std::int64_t> sizes, strides;
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
  std::unique_ptr<Reducer::SinkRegistration> registration;
};

}  // namespace ddpkit::optim
