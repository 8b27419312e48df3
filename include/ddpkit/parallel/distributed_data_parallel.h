// Tier 2: torch/nn/module.h.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/comm/timeline.h>
#include <ddpkit/parallel/join.h>
#include <ddpkit/parallel/pytree.h>
#include <ddpkit/parallel/reducer.h>

namespace ddpkit {

/// Names and defaults of Python's torch.nn.parallel.DistributedDataParallel.
struct DistributedDataParallelOptions {
  /// Gradients are reduced in buckets of about this many MiB.
  double bucket_cap_mb = 25;
  /// The first bucket is smaller, so that communication starts early.
  double first_bucket_cap_mb = 1;
  /// Give every rank rank 0's buffers (batch-norm statistics and the like) before each training forward.
  bool broadcast_buffers = true;
  /// Backward may leave out parameters, others on each rank and in each step. Those that no rank has used keep the
  /// gradient they had. Costs a walk through the graph and one more small collective a step. Parameters that forward's
  /// outputs do not depend on hold up no bucket, if the outputs can be looked into (see pytree.h).
  bool find_unused_parameters = false;
  /// The first backward shows which parameters are used; all others use the same. Spares what find_unused_parameters
  /// costs.
  bool static_graph = false;
  /// After backward, gradients lie in the buckets' memory, which spares a copy back. Where gradients are reduced where
  /// autograd made them (see arena), there is nothing to copy either way.
  bool gradient_as_bucket_view = false;
  /// Parameters and buffers that are none of DistributedDataParallel's business, by their names in the module.
  std::vector<std::string> parameters_to_ignore = {};
  /// With the `shm` backend: this process's large CPU tensors come from memory that all ranks of the host map, so that
  /// gradients are reduced where autograd makes them; of one rank alone they are its own. The memory is kept for reuse;
  /// a child made by fork() without exec() cannot see it. Off: gradients are copied into buckets.
  bool arena = true;
  /// The most memory that the arena takes, in MiB of each rank; what does not fit goes to malloc. Empty: 1 GiB or eight
  /// times the gradients, whichever is more, but no more than the rank's share of half the host's free memory.
  std::optional<double> arena_mb = std::nullopt;
};

/// The part of DistributedDataParallel that does not depend on the module's type.
class DistributedDataParallelBase : public Joinable {
 public:
  /// While it lives, backward leaves gradients local, to accumulate; the first backward after it averages the sums.
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(Reducer& reducer);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    Reducer* reducer_;
    bool before_;
  };

  /// Backwards while the guard lives are local. Not collective, but for all ranks alike.
  NoSync no_sync() { return NoSync(*reducer_); }

  /// Collective, outside backward: from now on `hook` reduces the buckets of gradients, as Python's
  /// register_comm_hook. See comm_hooks.h. Buckets become flat, so that gradients are
  /// copied into them.
  void register_comm_hook(CommHook hook) { reducer_->set_comm_hook(std::move(hook)); }

  /// What has happened so far on this rank: buckets, bytes, how much of the communication backward has hidden.
  DistributedDataParallelStats stats() const { return reducer_->stats(); }

  /// From now on forward passes and synchronised backwards are recorded. Nothing ends that. On all ranks, or
  /// Timeline::write() lacks the others.
  void set_timeline(std::optional<Timeline> timeline);

  const ProcessGroup& join_group() const override { return group_; }

  /// The ranks that average.
  const ProcessGroup& group() const noexcept { return group_; }
  /// What does it: buckets, arena, the last backward's times.
  Reducer& reducer() noexcept { return *reducer_; }
  const Reducer& reducer() const noexcept { return *reducer_; }

 protected:
  DistributedDataParallelBase(torch::nn::Module& module, ProcessGroup group,
                              const DistributedDataParallelOptions& options);
  /// Everything that has to happen before and after a forward pass.
  void before_forward();
  template <class Outputs>
  void after_forward(const Outputs& outputs) {
    record_forward();
    if (!c10::GradMode::is_enabled()) return;
    std::vector<at::Tensor> tensors;
    if (collect_tensors(outputs, tensors)) reducer_->prepare_for_backward(tensors);
  }
  /// In the timeline, if there is one.
  void record_forward();

 private:
  void join_begin() override;
  void join_shadow(int event) override;
  void join_end(int source) override;
  bool broadcast_buffers();
  void write_buffer(std::size_t index, const at::Tensor& values);

  ProcessGroup group_;
  torch::nn::Module* module_;
  DistributedDataParallelOptions options_;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> buffers_;
  std::vector<std::int64_t> buffer_versions_;  ///< After the last broadcast. [buffer]
  std::vector<at::Tensor> buffer_messages_;    ///< What each forward's broadcast of the buffers puts them into.
  std::optional<Timeline> timeline_;
  std::chrono::steady_clock::time_point forward_began_;  ///< Only with a timeline.
  std::unique_ptr<Reducer> reducer_;
};

/// Trains one copy of `module` on every rank of a group as if one process saw all their batches: the gradient after
/// backward is the mean of the ranks' gradients, bit-identical on all of them, and its all-reduce runs while backward
/// does.
///
///     ddpkit::DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 50});
///     auto loss = torch::cross_entropy_loss(ddp(batch.data), batch.target);
///     loss.backward();
///
/// The module stays the caller's own: save it, name its parameters, hand them to an optimizer as if it were not
/// wrapped. It must be on its device, with every `requires_grad` set, before it is wrapped.
template <class M>
class DistributedDataParallel : public DistributedDataParallelBase {
 public:
  /// Collective. Checks that the module has the same parameters and buffers on every rank (throws ModelMismatch on all
  /// of them, naming the first that differs) and gives every rank rank 0's values.
  DistributedDataParallel(std::shared_ptr<M> module, ProcessGroup group,
                          const DistributedDataParallelOptions& options = {})
      : DistributedDataParallelBase(*module, std::move(group), options), module_(std::move(module)) {}

  /// A module made with TORCH_MODULE.
  template <class Holder>
  requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder> DistributedDataParallel(
      const Holder& holder, ProcessGroup group, const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(holder.ptr(), std::move(group), options) {}

  /// The module's forward, whatever it takes and returns. Collective while training when there are buffers to
  /// broadcast.
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    before_forward();
    if constexpr (std::is_void_v<decltype(module_->forward(std::forward<Args>(args)...))>) {
      module_->forward(std::forward<Args>(args)...);
      record_forward();
    } else {
      decltype(auto) outputs = module_->forward(std::forward<Args>(args)...);
      after_forward(outputs);
      return outputs;
    }
  }
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  /// The bare module: what optimizers, checkpoints and evaluation take.
  M& module() noexcept { return *module_; }
  const M& module() const noexcept { return *module_; }
  const std::shared_ptr<M>& module_ptr() const noexcept { return module_; }

 private:
  std::shared_ptr<M> module_;
};

template <class Holder>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder> DistributedDataParallel(const Holder&,
                                                                                                 ProcessGroup)
->DistributedDataParallel<typename Holder::ContainedType>;
template <class Holder>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder> DistributedDataParallel(
    const Holder&, ProcessGroup, DistributedDataParallelOptions)
->DistributedDataParallel<typename Holder::ContainedType>;

/// Collective, between steps. Throws ModelMismatch on all ranks if a parameter that `ddp` averages has other values on
/// one rank, and names it: a step on one rank only, or a write outside the optimizer. Reads all parameters once; call
/// it at checkpoints.
void check_same_parameters(const DistributedDataParallelBase& ddp);

}  // namespace ddpkit
