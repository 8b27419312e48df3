// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include <ddpkit/comm/arena_stats.h>
#include <ddpkit/comm/process_group.h>
#include <ddpkit/comm/trace.h>
#include <ddpkit/parallel/bucket_plan.h>
#include <ddpkit/parallel/comm_hooks.h>
#include <ddpkit/parallel/stats.h>

namespace ddpkit {

/// Options with the names and meanings of DistributedDataParallelOptions, sizes in bytes.
struct ReducerOptions {
  /// See DistributedDataParallelOptions.
  /// @{
  std::size_t first_bucket_bytes = std::size_t{1} << 20;
  std::size_t bucket_bytes = std::size_t{25} << 20;
  bool find_unused_parameters = false;
  bool static_graph = false;
  bool gradient_as_bucket_view = false;
  bool arena = true;
  std::optional<std::size_t> arena_bytes = std::nullopt;
  /// @}
};

/// Averages gradients over ranks while backward runs. Hooks on the parameters' gradient accumulators receive each
/// gradient. A full bucket's all-reduce starts immediately. The end of backward waits for the last bucket.
/// DistributedDataParallel has one. Make one yourself for a model that is no torch::nn::Module:
///
///     ddpkit::Reducer reducer({{"weight", weight}, {"bias", bias}}, group);
///     reducer.prepare_for_forward();
///     const auto outputs = forward(inputs);
///     reducer.prepare_for_backward({outputs});
///     loss(outputs).backward();  // afterwards, weight.grad() is the mean over the ranks
///
/// Backward must compute a gradient for every parameter on each rank, unless unused parameters are allowed. Otherwise
/// it throws on this rank and reports the error to the others. One backward at a time. The parameters must outlive the
/// reducer's last backward.
///
/// A parameter has one reducer: the newest. The next forward pass through an older reducer throws InvalidArgument.
class Reducer {
 public:
  class Impl;  ///< Internal.

  /// While the guard exists, backward accumulates gradients locally. The first backward after it averages the sums.
  class [[nodiscard]] NoSync {
   public:
    ~NoSync();
    NoSync(NoSync&&) noexcept = default;  ///< Guards can be moved, for example into a std::optional.
    NoSync& operator=(NoSync&&) = delete;

   private:
    friend class Reducer;
    explicit NoSync(std::shared_ptr<Impl> impl);
    std::shared_ptr<Impl> impl_;
    bool before_;
  };

  /// Collective. Averages gradients of `parameters`. Each is listed once; same on all ranks. Parameters without
  /// requires_grad are ignored. The parameters keep their values: ranks must start with the same ones.
  Reducer(std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options = {});
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Call before a forward pass. Installs hooks again if parameters have new autograd objects, for example after
  /// torch::load(). Throws ModelMismatch if a parameter was cast, moved, resized or unfrozen since the construction.
  /// `expects_backward`: a backward will follow, so all ranks run this forward pass.
  void prepare_for_forward(bool expects_backward = true);

  /// Call after a forward pass that returned `outputs`. If `outputs` depend on no parameter and a synchronized backward
  /// follows, that backward counts as one in which this rank used no parameter. With find_unused_parameters, buckets do
  /// not wait for parameters that `outputs` do not depend on. The outputs of several forwards before one backward are
  /// combined. Without this call, unused parameters are known only when backward ends. A timeline records backward from
  /// the time at which it reaches one of `outputs`; without this call, from the first gradient.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);

  /// Returns a guard: backwards while it exists are local. Not collective, but all ranks must use it alike.
  NoSync no_sync();

  /// Reduces the buckets with `hook` from the next backward on. Sparse gradients are not passed to the hook. An empty
  /// hook restores the all-reduce. Collective; must not be called within backward.
  void register_comm_hook(CommHook hook);

  /// Records each synchronized backward from now on, with its buckets and waits. An empty timeline stops the recording.
  void set_timeline(std::optional<Timeline> timeline);

  /// See DistributedDataParallelStats.
  DistributedDataParallelStats stats() const;
  /// Returns the buckets, in the order of reduction. They contain the dense parameters that had requires_grad at the
  /// construction; the indices count these, in the order of the constructor's list. [bucket][position]
  const BucketPlan& buckets() const noexcept;
  /// Returns statistics of the arena; empty without an arena.
  std::optional<ArenaStats> arena() const;

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace ddpkit
