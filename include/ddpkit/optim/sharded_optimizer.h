// Tier 2: torch/optim/optimizer.h and ddpkit/parallel/distributed_data_parallel.h.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <vector>

#include <ddpkit/optim/fused_optimizer.h>
#include <ddpkit/parallel/distributed_data_parallel.h>

namespace ddpkit::optim {

class Shards;

/// Options of ShardedOptimizer.
struct ShardedOptions {
  /// Only with the `shm` backend; other backends throw InvalidArgument. The host keeps one copy of the weights: all
  /// ranks read it, and each rank updates its part. Saves memory and the all-gather of the weights. Costs: the weights
  /// are mapped read-only, the library installs a SIGSEGV handler, and system calls that write into weights (read(2),
  /// recv(2)) fail with EFAULT. See docs/optimizers.md.
  bool shared_weights = false;
  /// Update each bucket's weights within backward, as soon as the bucket is reduced, and release its gradients. Needs
  /// the least memory and time. step() then only waits for the other ranks. Cannot be combined with gradient clipping
  /// or GradScaler, which need all gradients before the first update. Every synchronized backward is a step. Only one
  /// backward per graph is possible (no retain_graph).
  bool update_in_backward = false;
};

/// ZeRO stage 2 (Rajbhandari and others, arXiv 1910.02054): gradients and optimizer state are sharded, weights are not.
/// The parameters of a bucket form one flat tensor, which is cut into one shard per rank. Backward reduce-scatters each
/// bucket. Each rank keeps the gradients and the optimizer state of its shards, and updates the weights in its shards.
/// The buckets stay as they are when the optimizer is made.
///
///     ddpkit::DistributedDataParallel ddp(model, group);
///     ddpkit::optim::ShardedOptimizer<ddpkit::optim::FusedAdamW> optimizer(ddp, torch::optim::AdamWOptions(1e-3));
///
/// Use it like any optimizer: zero_grad(), backward, step(). Differences:
/// - Backward leaves the model's parameters without a gradient. param_groups() has one tensor per parameter: the
///   parameter's elements in this rank's shard, one-dimensional, possibly none. These tensors have the averaged
///   gradients. step() releases the gradients.
/// - Call zero_grad() of this class, not of the module.
/// - Call clip_grad_norm() of this class, not the free function.
/// - Parameter groups are fixed. To train another parameter, wrap the model again and make a new optimizer.
///
/// A DistributedDataParallel has one sharded optimizer: the newest. After `optimizer = ShardedOptimizer<...>(ddp, ...)`
/// the new one continues from the weights, with new state. step() throws InvalidArgument if a newer ShardedOptimizer
/// exists for the same DistributedDataParallel, or if the DistributedDataParallel has been destroyed. The two may be
/// destroyed in any order.
///
/// With shared weights, all ranks share the parameters' memory. Writing to a parameter outside step() (clamping a
/// weight, loading a checkpoint) works as on private memory: the rank sees its own write. If all ranks have written the
/// same values, the next step applies them once. Otherwise it throws InvalidArgument on all ranks, which names the
/// parameter and a rank. (This uses page faults: see docs/optimizers.md.)
///
/// In an elastic group (InitOptions::elastic) on `shm`, without ShardedOptions, the other ranks have the state of a
/// lost rank: DistributedDataParallel::regroup() gives each remaining rank new shards. The tensors in param_groups()
/// are then copies of the weights, as of the last update.
///
/// Construction, step(), clip_grad_norm() and consolidate_state() are collective. Not thread-safe.
class ShardedOptimizerBase : public torch::optim::Optimizer, public GradientScaling, public Joinable {
 public:
  ~ShardedOptimizerBase() override;

  /// Updates all parameters. Collective. Throws InvalidArgument for a closure.
  at::Tensor step(LossClosure closure = nullptr) final;
  void step_scaled(double factor) override;
  /// Also clears the gradients that backward under no_sync() has accumulated in the model's parameters. zero_grad()
  /// called through a torch::optim::Optimizer& does not, because LibTorch's function is not virtual.
  void zero_grad(bool set_to_none = true);

  /// Does clip_grad_norm_() with the gradients of all ranks. Collective.
  double clip_grad_norm(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false);
  bool has_sharded_gradients() const noexcept override { return true; }

  /// Not available. A group added through torch::optim::Optimizer makes the next step() throw InvalidArgument.
  void add_param_group(const torch::optim::OptimizerParamGroup& group) = delete;

  /// Returns whether the host keeps one copy of the weights.
  bool has_shared_weights() const noexcept;

  /// Gathers the whole state on rank `to` for save(), like Python's ZeroRedundancyOptimizer. Collective. The next step
  /// releases the gathered state. train::save_checkpoint() calls it.
  void consolidate_state(int to = 0) const;
  /// Returns the optimizer of the whole parameters that consolidate_state() has made. Throws InvalidArgument on ranks
  /// that did not gather the state.
  const FusedOptimizer& consolidated() const;
  /// Writes the archive that the optimizer of one process without sharding would write; torch::optim can load it. Not
  /// collective. Throws InvalidArgument on a rank without consolidated state.
  void save(torch::serialize::OutputArchive& archive) const final;
  /// Loads an archive of any world size, or of torch::optim. Every rank reads the whole archive and keeps its part. Not
  /// collective.
  void load(torch::serialize::InputArchive& archive) final;

  const ProcessGroup& join_group() const override;

 protected:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;  ///< Parameter groups. [group]
  /// Makes an optimizer of `groups`, which are shards or whole parameters.
  using Factory = std::function<std::unique_ptr<FusedOptimizer>(const Groups& groups)>;

  /// Collective. `groups` hold exactly the parameters that `ddp` averages.
  ShardedOptimizerBase(DistributedDataParallelBase& ddp, const Groups& groups,
                       std::unique_ptr<torch::optim::OptimizerOptions> defaults, Factory factory,
                       const ShardedOptions& options);
  /// Returns the parameters that `ddp` averages. [param]
  static std::vector<at::Tensor> parameters_of(const DistributedDataParallelBase& ddp);
  ShardedOptimizerBase(ShardedOptimizerBase&& other) noexcept;
  ShardedOptimizerBase& operator=(ShardedOptimizerBase&& other) noexcept;

 private:
  friend class Shards;

  explicit ShardedOptimizerBase(std::shared_ptr<Shards> shards);
  void join_shadow(int event) override;
  void join_end(int source) override;

  std::shared_ptr<Shards> shards_;  ///< The reducer holds a weak pointer.
};

/// `Inner`: FusedAdamW, FusedAdam or FusedSGD. See ShardedOptimizerBase.
template <class Inner>
class ShardedOptimizer final : public ShardedOptimizerBase {
 public:
  /// Shards all parameters that `ddp` averages. Collective. Throws InvalidArgument for sparse gradients, communication
  /// hooks, parameters that overlap in memory, and options or parameters that `Inner` does not support.
  template <class Options>
  ShardedOptimizer(DistributedDataParallelBase& ddp, const Options& defaults, const ShardedOptions& options = {},
                   const FusedOptions& fused = {})
      : ShardedOptimizer(ddp, Groups{torch::optim::OptimizerParamGroup(parameters_of(ddp))}, defaults, options, fused) {
  }

  /// Takes parameter groups with separate options. Together they must hold all parameters that `ddp` averages.
  template <class Options>
  ShardedOptimizer(DistributedDataParallelBase& ddp, const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   const Options& defaults, const ShardedOptions& options = {}, const FusedOptions& fused = {})
      : ShardedOptimizerBase(
            ddp, groups, std::make_unique<Options>(defaults),
            [defaults, fused](const Groups& parts) -> std::unique_ptr<FusedOptimizer> {
              return std::make_unique<Inner>(parts, defaults, fused);
            },
            options) {}
};

}  // namespace ddpkit::optim
