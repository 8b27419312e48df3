// Tier 2: torch/nn/module.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddpkit/parallel/distributed_data_parallel.h>

namespace ddpkit {

struct ShardedModel;

/// Names and defaults are those of Python's torch.distributed.fsdp.MixedPrecisionPolicy.
struct FullyShardedPrecision {
  /// Type of gathered parameters: the module computes with it. The shards, and so the optimizer, keep the type that the
  /// module had. Empty: the type of the shards.
  std::optional<at::ScalarType> param_dtype = std::nullopt;
  /// Type in which gradients are averaged over the ranks. The optimizer gets them in the type of the shards. Empty: the
  /// type of the gathered parameters.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
  /// Cast floating tensors in the arguments of forward() to param_dtype.
  bool cast_forward_inputs = true;
};

/// Options of FullyShardedDataParallel. All ranks pass the same.
struct FullyShardedOptions {
  /// Names of the modules that are gathered one at a time; the part `*` matches any name, as "blocks.*". Empty: the
  /// children of the outermost ModuleList, ModuleDict and Sequential. The parameters of no unit are the root's.
  std::vector<std::string> units = {};
  /// A unit smaller than this, in MiB, is merged with the next one.
  double min_unit_mb = 1;
  /// True: 1 + prefetch units are whole at a time, and backward gathers the units again (ZeRO stage 3). False: units
  /// stay whole from forward to step(), which saves the second gather.
  bool reshard_after_forward = true;
  /// Number of units that are gathered while the unit before them is in use, in the order of the last step. At most
  /// 1 + prefetch units are whole, besides the root. 0: a unit is gathered when it is used. The shm backend always uses
  /// 0, because it moves no data in the background.
  int prefetch = 1;
  /// HSDP: the number of copies of the model. Each world_size / replicas neighbouring ranks, such as the ranks of a
  /// host, share one. Gathers and reduce-scatters stay among them, and one all-reduce averages the shards of the
  /// gradients over the replicas. Divides the number of ranks.
  int replicas = 1;
  /// Types that differ from the type of the module. Affects floating parameters.
  FullyShardedPrecision precision = {};
  /// See DistributedDataParallelOptions.
  /// @{
  bool find_unused_parameters = false;
  bool broadcast_buffers = true;
  /// @}
};

/// Collective. Shards the parameters of a module, usually a block of a transformer that was just built. If each block
/// is sharded before the next one is built, no rank ever has the whole model:
///
///     for (int i = 0; i < 96; ++i) {
///       blocks->push_back(Block(width));
///       ddpkit::fully_shard(*blocks[i], group);
///     }
///
/// All ranks get rank 0's parameters. They cannot be used until FullyShardedDataParallel wraps the whole model with the
/// same group; each such module is a unit then. Set values and `requires_grad` before. `options`: only `replicas` and
/// `precision` matter, and must be those of FullyShardedDataParallel. Throws like FullyShardedDataParallel.
void fully_shard(torch::nn::Module& module, const ProcessGroup& group, const FullyShardedOptions& options = {});

/// A unit of FullyShardedDataParallel.
struct FullyShardedUnit {
  std::string name;            ///< Of its module: "blocks.0", "blocks.0 to blocks.3" after a merge, or "root".
  std::size_t bytes = 0;       ///< Of its parameters, with padding.
  std::size_t parameters = 0;  ///< Number of parameters.
  std::uint64_t gathers = 0;   ///< Number of times that the unit was gathered.
};

/// The part of FullyShardedDataParallel that does not depend on the module's type.
class FullyShardedDataParallelBase : public DistributedDataParallelBase {
 public:
  /// Scope in which the parameters may be used outside forward and backward. The FullyShardedDataParallel must outlive
  /// it.
  class [[nodiscard]] Gathering {
   public:
    ~Gathering();
    Gathering(Gathering&&) noexcept = default;  ///< Scopes can be moved, for example into a std::optional.
    Gathering& operator=(Gathering&&) = delete;

   private:
    friend class FullyShardedDataParallelBase;
    Gathering(std::shared_ptr<ParameterShards> shards, bool whole);
    std::shared_ptr<ParameterShards> shards_;
    bool whole_;
  };

  ~FullyShardedDataParallelBase() override;

  /// In the scope, each unit is gathered when it is used. All ranks must use the same units in the same order, and
  /// write the same values.
  Gathering gathering();
  /// Collective. Gathers all units, which stay whole until the scope ends. In the scope, the parameters are ordinary
  /// tensors: torch::save() works, and one rank alone may run module().forward(). All ranks must write the same values.
  Gathering whole();

  /// Returns the units in the order in which forward is expected to use them, the root last. [unit]
  std::vector<FullyShardedUnit> units() const;

 protected:
  /// Collective. See FullyShardedDataParallel.
  FullyShardedDataParallelBase(torch::nn::Module& module, const ProcessGroup& group,
                               const FullyShardedOptions& options);
  FullyShardedDataParallelBase(FullyShardedDataParallelBase&&) noexcept;
  FullyShardedDataParallelBase& operator=(FullyShardedDataParallelBase&&) noexcept;
  /// See DistributedDataParallelBase.
  /// @{
  Gathering before_forward();
  template <class T>
  decltype(auto) cast_inputs(T&& argument) const {
    if constexpr (detail::TreeLike<std::decay_t<T>>) {
      return tree_map<std::decay_t<T>>(argument, [this](const at::Tensor& tensor) { return cast_input(tensor); });
    } else {
      return std::forward<T>(argument);
    }
  }
  /// @}

 private:
  FullyShardedDataParallelBase(torch::nn::Module& module, const ProcessGroup& group, const FullyShardedOptions& options,
                               ShardedModel&& sharded);
  void join_begin() override;
  at::Tensor cast_input(const at::Tensor& tensor) const;

  std::shared_ptr<ParameterShards> shards_;
  std::optional<at::ScalarType> input_dtype_;
};

/// ZeRO stage 3 (Rajbhandari and others, arXiv 1910.02054): each rank keeps a shard of the parameters, the gradients
/// and the optimizer's state. A unit, such as a block of a transformer, is gathered when an operation uses one of its
/// parameters, and released when another unit is used. The result is that of DistributedDataParallel.
///
///     ddpkit::FullyShardedDataParallel fsdp(model, group);
///     ddpkit::optim::ShardedOptimizer<ddpkit::optim::FusedAdamW> optimizer(fsdp, torch::optim::AdamWOptions(1e-3));
///     torch::cross_entropy_loss(fsdp(batch.data), batch.target).backward();
///     optimizer.step();
///
/// The model needs no change: every operation on a parameter or a view of it gathers the unit, also in functions other
/// than forward() that the module's forward calls. Train with a ShardedOptimizer. Without one, backward leaves whole
/// averaged gradients in the parameters.
///
/// Outside fsdp(), backward and the scopes of gathering() and whole(), the use of a parameter throws InvalidArgument,
/// which names the unit and the operation: other ranks would wait for this rank in the gather, or not gather at all.
/// Ranks that use units in different orders throw CollectiveMismatch, which names both units.
///
/// Under no_sync(), backward accumulates whole gradients, which need as much memory as without sharding. Without it,
/// each backward adds to the sharded gradients.
///
/// On a GPU, gathers and reductions run beside the computation, and the host waits for the other ranks' hosts only. All
/// ranks must use the parameters of a unit in the same order then. Not supported: optim::GraphedStep, join(),
/// communication hooks, sparse gradients, and the options update_in_backward and shared_weights of ShardedOptimizer.
/// They throw InvalidArgument. The weights are lost when the FullyShardedDataParallel is destroyed: save them before.
template <class M>
class FullyShardedDataParallel : public ModuleWrapper<M, FullyShardedDataParallelBase> {
 public:
  /// Collective. Broadcasts rank 0's parameters and buffers, and shards the parameters. Set every `requires_grad`
  /// before. Throws ModelMismatch on all ranks if the models differ. Throws InvalidArgument on all ranks for a
  /// parameter that is not dense, not on the group's device, shares memory with another tensor, or is sharded already.
  FullyShardedDataParallel(std::shared_ptr<M> module, ProcessGroup group, const FullyShardedOptions& options = {})
      : ModuleWrapper<M, FullyShardedDataParallelBase>(std::move(module), std::move(group), options) {}
  /// Takes a module made with TORCH_MODULE.
  template <class Holder>
  requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder> FullyShardedDataParallel(
      const Holder& holder, ProcessGroup group, const FullyShardedOptions& options = {})
      : FullyShardedDataParallel(holder.ptr(), std::move(group), options) {}
};

/// FullyShardedDataParallel of a holder has the type of the holder's module.
template <class Holder>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder> FullyShardedDataParallel(
    const Holder&, ProcessGroup, FullyShardedOptions = {})
->FullyShardedDataParallel<typename Holder::ContainedType>;

}  // namespace ddpkit
