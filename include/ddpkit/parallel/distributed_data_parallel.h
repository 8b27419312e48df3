// Tier 2: torch/nn/module.h.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/comm/trace.h>
#include <ddpkit/parallel/join.h>
#include <ddpkit/parallel/pytree.h>
#include <ddpkit/parallel/reducer.h>

namespace ddpkit {

class ParameterShards;

/// Names and defaults are those of Python's torch.nn.parallel.DistributedDataParallel.
struct DistributedDataParallelOptions {
  /// Size of the gradient buckets, in MiB.
  double bucket_cap_mb = 25;
  /// Size of the first bucket, in MiB. It is smaller so that communication starts early.
  double first_bucket_cap_mb = 1;
  /// Broadcast the buffers of rank 0 (batch-norm statistics and others) before each training forward.
  bool broadcast_buffers = true;
  /// Allow parameters without a gradient, also different ones per rank and step. Parameters that no rank has used keep
  /// their gradient. Costs a traversal of the graph and one small collective per step. Buckets do not wait for
  /// parameters that forward's outputs do not depend on, if the tensors in the outputs can be found (see pytree.h).
  bool find_unused_parameters = false;
  /// The set of used parameters is the same in all iterations. The first backward determines it. Avoids the cost of
  /// find_unused_parameters.
  bool static_graph = false;
  /// After backward, gradients are views of the buckets, which avoids a copy. No effect with an arena (see `arena`),
  /// where gradients are reduced in place.
  bool gradient_as_bucket_view = false;
  /// Names of parameters and buffers that DistributedDataParallel neither averages nor broadcasts.
  std::vector<std::string> parameters_to_ignore = {};
  /// With the `shm` backend: allocate this process's large CPU tensors from an arena that all ranks of the host map, so
  /// that gradients are reduced in place. With one rank the arena is private. It keeps its memory for reuse. A child
  /// made by fork() without exec() cannot read the arena. False: gradients are copied into buckets.
  bool arena = true;
  /// Maximum size of the arena, in MiB per rank. Larger requests go to malloc. Empty: 1 GiB or eight times the
  /// gradients, whichever is more, but at most the rank's share of half of the host's free memory.
  std::optional<double> arena_mb = std::nullopt;
};

/// The part of DistributedDataParallel that does not depend on the module's type.
class DistributedDataParallelBase : public Joinable {
 public:
  ~DistributedDataParallelBase() override;

  /// Returns a guard: backwards while it exists are local. Not collective, but all ranks must use it alike.
  Reducer::NoSync no_sync() { return reducer().no_sync(); }

  /// Reduces the buckets of gradients with `hook` from now on, like Python's register_comm_hook. See comm_hooks.h.
  /// Collective; must not be called within backward. Gradients are then copied into flat buckets.
  void register_comm_hook(CommHook hook) { reducer().register_comm_hook(std::move(hook)); }

  /// Returns this rank's statistics: buckets, bytes, the part of the communication that overlapped with backward.
  DistributedDataParallelStats stats() const { return reducer().stats(); }

  /// Records forward passes and synchronized backwards from now on. Call it on all ranks; otherwise Timeline::write()
  /// has no events of the other ranks.
  void set_timeline(std::optional<Timeline> timeline);

  /// After the group has changed: averages over its ranks. Parameters, which must be equal on all former ranks, and
  /// buffers keep their values. `new_ranks`: number of new ranks, the last ones. They get the values of a former rank,
  /// also of DistributedDataParallelOptions::parameters_to_ignore. A ShardedOptimizer gets new shards. Collective.
  /// Drops the gradients. Throws InvalidArgument with a communication hook, sharded parameters, a ShardedOptimizer that
  /// does not survive the loss of a rank, or within join().
  void regroup(int new_ranks = 0);

  const ProcessGroup& join_group() const override { return group(); }

  /// Returns the group of ranks that average gradients.
  const ProcessGroup& group() const noexcept;
  /// Returns the reducer: buckets, arena, times of the last backward.
  Reducer& reducer() noexcept;
  const Reducer& reducer() const noexcept;  ///< The same reducer.

 protected:
  /// Collective. See DistributedDataParallel. `module` must outlive this object. `shards`: of the parameters, if each
  /// rank keeps only a shard.
  DistributedDataParallelBase(torch::nn::Module& module, ProcessGroup group,
                              const DistributedDataParallelOptions& options,
                              const std::shared_ptr<ParameterShards>& shards = nullptr);
  DistributedDataParallelBase(DistributedDataParallelBase&&) noexcept;
  DistributedDataParallelBase& operator=(DistributedDataParallelBase&&) noexcept;
  struct NoScope {};  ///< Result of before_forward().
  /// Must be called before each forward pass. Collective in training mode if there are buffers to broadcast. The result
  /// must live until the forward pass has ended.
  NoScope before_forward();
  /// Returns the argument for the module's forward().
  template <class T>
  T&& cast_inputs(T&& argument) const {
    return std::forward<T>(argument);
  }
  /// Must be called after each forward pass, with its result.
  template <class Outputs>
  void after_forward(const Outputs& outputs) {
    record_forward();
    if (!c10::GradMode::is_enabled()) return;
    std::vector<at::Tensor> tensors;
    if (collect_tensors(outputs, tensors)) reducer().prepare_for_backward(tensors);
  }
  /// Records the forward pass in the timeline, if there is one.
  void record_forward();

 private:
  void join_begin() override;
  void join_shadow(int event) override;
  void join_end(int source) override;

  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// The module, and forward(), of DistributedDataParallel and FullyShardedDataParallel. `Base` does not depend on the
/// module's type.
template <class M, class Base>
class ModuleWrapper : public Base {
 public:
  /// Calls the module's forward with the same arguments and result. Collective with FullyShardedDataParallel, and in
  /// training mode if there are buffers to broadcast.
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    [[maybe_unused]] const auto scope = this->before_forward();
    if constexpr (std::is_void_v<decltype(module_->forward(this->cast_inputs(std::forward<Args>(args))...))>) {
      module_->forward(this->cast_inputs(std::forward<Args>(args))...);
      this->record_forward();
    } else {
      decltype(auto) outputs = module_->forward(this->cast_inputs(std::forward<Args>(args))...);
      this->after_forward(outputs);
      return outputs;
    }
  }
  /// Same as forward().
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  /// Returns the module without the wrapper, for optimizers, checkpoints and evaluation.
  M& module() noexcept { return *module_; }
  const M& module() const noexcept { return *module_; }  ///< The same module.
  /// Returns a pointer to the module. The wrapper and its caller own the module together.
  const std::shared_ptr<M>& module_ptr() const noexcept { return module_; }

 protected:
  /// Collective.
  template <class Options>
  ModuleWrapper(std::shared_ptr<M> module, ProcessGroup group, const Options& options)
      : Base(*module, std::move(group), options), module_(std::move(module)) {}

 private:
  std::shared_ptr<M> module_;
};

/// Trains one copy of `module` per rank. The result is that of one process with the batches of all ranks. The gradient
/// after backward is the mean of the ranks' gradients, bit-identical on all ranks. The all-reduce overlaps with
/// backward.
///
///     ddpkit::DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 50});
///     auto loss = torch::cross_entropy_loss(ddp(batch.data), batch.target);
///     loss.backward();
///
/// The caller keeps using the module: save it, name its parameters, and pass them to an optimizer as without wrapping.
/// Before wrapping, move the module to its device and set every `requires_grad`.
template <class M>
class DistributedDataParallel : public ModuleWrapper<M, DistributedDataParallelBase> {
 public:
  /// Collective. Broadcasts rank 0's parameters and buffers. Throws ModelMismatch on all ranks if their names, shapes
  /// or types differ between ranks; the error names the first difference.
  DistributedDataParallel(std::shared_ptr<M> module, ProcessGroup group,
                          const DistributedDataParallelOptions& options = {})
      : ModuleWrapper<M, DistributedDataParallelBase>(std::move(module), std::move(group), options) {}
  /// Takes a module made with TORCH_MODULE.
  template <class Holder>
  requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder> DistributedDataParallel(
      const Holder& holder, ProcessGroup group, const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(holder.ptr(), std::move(group), options) {}
};

/// DistributedDataParallel of a holder has the type of the holder's module.
template <class Holder>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder> DistributedDataParallel(
    const Holder&, ProcessGroup, DistributedDataParallelOptions = {})
->DistributedDataParallel<typename Holder::ContainedType>;

/// Throws ModelMismatch on all ranks if a parameter that `ddp` averages has other values on one rank, and names it.
/// Possible causes are a step on one rank only and a write outside the optimizer. Collective, between steps. Reads all
/// parameters once; call it at checkpoints.
void check_same_parameters(const DistributedDataParallelBase& ddp);

}  // namespace ddpkit
