// Tier 2: torch/optim/optimizer.h and ddpkit/parallel/distributed_data_parallel.h.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ddpkit/optim/fused_optimizer.h>
#include <ddpkit/parallel/distributed_data_parallel.h>

namespace ddpkit::optim {

/// Options of ShardedOptimizer.
struct ShardedOptions {
  /// With the `shm` backend: the host keeps one copy of the weights, which all ranks read and each rank updates in
  /// part. Saves memory and the gathering of the weights. The price: the weights are mapped read-only, the library
  /// installs a SIGSEGV handler, and system calls that write into weights (read(2), recv(2)) fail with EFAULT. See
  /// docs/optimizers.md. Throws InvalidArgument with other backends.
  bool shared_weights = false;
  /// Each bucket's weights are updated within backward, as soon as the bucket is reduced, and its gradients are
  /// released: least memory and least time. step() then only waits for the other ranks. Not with gradient clipping or
  /// GradScaler, which need all gradients before the first update; every synchronised backward is a step, and there is
  /// one backward to a graph (no retain_graph).
  bool update_in_backward = false;
};

/// ZeRO stage 1 (Rajbhandari and others, arXiv 1910.02054): each rank keeps the optimizer's state of its slice of every
/// parameter, and updates that slice. Backward reduce-scatters gradients instead of all-reducing them.
///
///     ddpkit::DistributedDataParallel ddp(model, group);
///     ddpkit::optim::ShardedOptimizer<ddpkit::optim::FusedAdamW> optimizer(ddp, torch::optim::AdamWOptions(1e-3));
///
/// The same in a loop as any optimizer: zero_grad(), backward, step(). What differs:
/// - backward leaves the model's parameters without a gradient. The averaged slices are the gradients of the tensors in
///   param_groups(), which are one-dimensional, one for each parameter; step() uses them up.
/// - zero_grad() of this class, not the module's, drops them.
/// - clip_grad_norm() here, not the free function.
/// - parameter groups are fixed: to train another parameter, wrap the model again and make a new optimizer.
///
/// A DistributedDataParallel has one sharded optimizer: the newest. After `optimizer = ShardedOptimizer<...>(ddp, ...)`
/// the new one continues from the weights, with new state. step() throws InvalidArgument if another ShardedOptimizer
/// has been made of the same DistributedDataParallel since, or if that has been destroyed. The two may be destroyed in
/// any order.
///
/// With shared weights the parameters' memory is one for all ranks. Writing to a parameter outside step() (clamping a
/// weight, loading a checkpoint) works as on private memory: the rank sees its own write, and the next step applies
/// once what all ranks have written alike. If ranks have written differently, it throws InvalidArgument on all ranks,
/// naming the parameter and a rank. (A page fault makes that possible: see docs/optimizers.md.)
///
/// Construction, step(), clip_grad_norm() and consolidate_state() are collective. Not thread-safe.
class ShardedOptimizerBase : public torch::optim::Optimizer, public GradientScaling, public Joinable {
 public:
  ~ShardedOptimizerBase() override;

  /// Updates all parameters. Throws InvalidArgument for a closure.
  at::Tensor step(LossClosure closure = nullptr) final;
  void step_scaled(double factor) override;
  /// Also drops what backward under no_sync() has accumulated in the model's parameters, which zero_grad() through a
  /// torch::optim::Optimizer& does not: LibTorch's function is not virtual.
  void zero_grad(bool set_to_none = true);

  /// clip_grad_norm_() of the gradients of all ranks.
  double clip_grad_norm(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false);
  bool has_sharded_gradients() const noexcept override { return true; }

  /// A parameter that DistributedDataParallel does not average cannot be sharded. A group that is added through
  /// torch::optim::Optimizer makes the next step() throw InvalidArgument.
  void add_param_group(const torch::optim::OptimizerParamGroup& group) = delete;

  /// The optimizer of this rank's slices.
  const FusedOptimizer& inner() const noexcept;
  /// Whether the host keeps one copy of the weights.
  bool has_shared_weights() const noexcept;

  /// Collects the whole state on rank `to`, as Python's ZeroRedundancyOptimizer does, for save() to write; the next
  /// step releases it. train::save_checkpoint() calls it.
  void consolidate_state(int to = 0) const;
  /// The optimizer of the whole parameters that consolidate_state() has made. Throws InvalidArgument on a rank that has
  /// none.
  const FusedOptimizer& consolidated() const;
  /// An optimizer of the whole parameters, without state, and the way back: keeps this rank's part of its state and its
  /// options. Not collective.
  std::unique_ptr<FusedOptimizer> make_whole() const;
  void take_state(const FusedOptimizer& whole);
  /// The archive of the optimizer that is sharded, as a process alone would write it: torch::optim's own reads it.
  /// Not collective. Throws InvalidArgument on a rank without consolidated state.
  void save(torch::serialize::OutputArchive& archive) const final;
  /// Every rank reads the whole archive, of any world size or of torch::optim, and keeps its part. Not collective.
  void load(torch::serialize::InputArchive& archive) final;

  const ProcessGroup& join_group() const override;

 protected:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  using Factory = std::function<std::unique_ptr<FusedOptimizer>(const Groups& groups)>;

  /// Collective. `groups` hold the model's own parameters, all of those that `ddp` averages and no others.
  ShardedOptimizerBase(DistributedDataParallelBase& ddp, const Groups& groups,
                       std::unique_ptr<torch::optim::OptimizerOptions> defaults, Factory factory,
                       const ShardedOptions& options);
  static std::vector<at::Tensor> parameters_of(const DistributedDataParallelBase& ddp);
  ShardedOptimizerBase(ShardedOptimizerBase&& other) noexcept;
  ShardedOptimizerBase& operator=(ShardedOptimizerBase&& other) noexcept;

 private:
  struct Shards;

  explicit ShardedOptimizerBase(std::shared_ptr<Shards> shards);

  void join_shadow(int event) override;
  void join_end(int source) override;
  void step_together(double factor);
  double clip_together(std::vector<double> arguments);
  void update(double factor);
  void check_groups() const;
  void check_owner() const;
  void announce(int event);
  std::vector<double> follow_active_ranks(std::vector<double> arguments = {});
  std::string settings(const std::vector<double>& arguments) const;
  std::vector<double> take_settings(const std::string& bytes);

  std::shared_ptr<Shards> shards_;  ///< The reducer has a weak pointer.
};

/// `Inner`: FusedAdamW, FusedAdam or FusedSGD. See ShardedOptimizerBase.
template <class Inner>
class ShardedOptimizer final : public ShardedOptimizerBase {
 public:
  /// Collective. All parameters that `ddp` averages. Throws InvalidArgument for sparse gradients, communication hooks,
  /// parameters that overlap in memory, and what `Inner` refuses.
  template <class Options>
  ShardedOptimizer(DistributedDataParallelBase& ddp, const Options& defaults, const ShardedOptions& options = {},
                   const FusedOptions& fused = {})
      : ShardedOptimizer(ddp, Groups{torch::optim::OptimizerParamGroup(parameters_of(ddp))}, defaults, options, fused) {
  }

  /// In groups with options of their own, which together hold the same parameters.
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
