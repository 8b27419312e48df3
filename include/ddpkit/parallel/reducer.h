// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ddpkit/comm/arena_stats.h>
#include <ddpkit/comm/process_group.h>
#include <ddpkit/comm/timeline.h>
#include <ddpkit/parallel/comm_hooks.h>

namespace ddpkit {

/// One bucket in the last synchronized backward. Times are microseconds since the first gradient of that backward, on
/// the host's clock. On a GPU, the times are those of queueing the work, because reading the GPU's times would require
/// waiting.
struct BucketStats {
  std::size_t parameters = 0;  ///< Number of parameters in the bucket.
  std::size_t bytes = 0;       ///< Bytes of gradients.
  std::size_t sent_bytes = 0;  ///< Passed to collectives: less than `bytes` if a communication hook compresses.
  double ready_us = 0;         ///< The last gradient was ready.
  double started_us = 0;       ///< The reduction was passed to the backend.
  double done_us = 0;          ///< The reduction was seen to be complete. Checked at each gradient and at the end.
};

/// Statistics of DistributedDataParallel on this rank. A step is a synchronized backward. Only dense gradients count:
/// sparse gradients are gathered at the end of backward and are not in buckets.
struct DistributedDataParallelStats {
  std::uint64_t steps = 0;       ///< Synchronized backwards.
  int rebuilds = 0;              ///< Number of times that the buckets were rebuilt.
  std::uint64_t bytes = 0;       ///< Bytes of gradients over all steps.
  std::uint64_t sent_bytes = 0;  ///< Passed to collectives by this rank over all steps. 0 for one rank.
  double communication_us = 0;   ///< Time with a bucket in flight over all steps. 0 on a GPU: see BucketStats.
  double hidden_us = 0;          ///< The part of `communication_us` before the last gradient.

  std::vector<BucketStats> buckets = {};  ///< Last step, in the order of reduction. [bucket]
  double last_gradient_us = 0;            ///< Last step: time of the last gradient, since the first gradient.
  double end_us = 0;                      ///< Last step: all gradients were reduced, since the first gradient.

  /// Returns the share of the communication that overlapped with backward: 0 to 1. 0 before the first step.
  double hidden_share() const noexcept { return communication_us > 0 ? hidden_us / communication_us : 0; }
};

/// A parameter and its name in the module.
struct NamedParameter {
  std::string name;     ///< Such as "features.0.weight".
  at::Tensor tensor;    ///< The parameter itself.
  bool sparse = false;  ///< Its gradient is a sparse tensor.
};

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
///
/// Backward must compute a gradient for every parameter on each rank, unless unused parameters are allowed. Otherwise
/// it throws on this rank and reports the error to the others. One backward at a time. The parameters must outlive the
/// reducer's last backward.
///
/// A parameter has one reducer: the newest. The next forward pass through an older reducer throws InvalidArgument.
class Reducer {
  class Impl;

 public:
  /// Collective. Averages gradients of `parameters`. They have requires_grad; each is listed once; same on all ranks.
  Reducer(std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options = {});
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Call before a forward pass. Installs hooks again if parameters have new autograd objects, for example after
  /// torch::load(). Throws ModelMismatch if a parameter was cast, moved, resized or unfrozen since the construction.
  /// `expects_backward`: a backward will follow, so all ranks run this forward pass.
  void prepare_for_forward(bool expects_backward);

  /// False: backward accumulates gradients locally until the next synchronized backward.
  void set_synchronize(bool synchronize) noexcept;
  bool synchronize() const noexcept;  ///< Set by set_synchronize(). Initially true.

  /// Reduces the buckets with `hook` from the next backward on. Sparse gradients are not passed to the hook. An empty
  /// hook restores the all-reduce. Collective; must not be called within backward.
  void set_comm_hook(CommHook hook);

  /// Returns all parameters, with the indices that buckets() has. [param]
  std::vector<NamedParameter> parameters() const;

  /// Call after a forward pass that returned `outputs`. If `outputs` depend on no parameter and a synchronized backward
  /// follows, that backward counts as one in which this rank used no parameter. With find_unused_parameters, buckets do
  /// not wait for parameters that `outputs` do not depend on. The outputs of several forwards before one backward are
  /// combined. Without this call, unused parameters are known only when backward ends. A timeline records backward from
  /// the time at which it reaches one of `outputs`; without this call, from the first gradient.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);

  /// Records each synchronized backward from now on, with its buckets and waits. An empty timeline stops the recording.
  /// `write_after`: number of backwards after which the timeline is written and removed; the same on all ranks. 0: the
  /// caller writes it.
  void set_timeline(std::optional<Timeline> timeline, std::uint64_t write_after = 0);

  /// Returns parameter indices by bucket, in the order of reduction. [bucket][position]
  const std::vector<std::vector<std::size_t>>& buckets() const noexcept;
  /// Returns the number of synchronized backwards.
  std::uint64_t backwards() const noexcept;
  /// See DistributedDataParallelStats.
  DistributedDataParallelStats stats() const;
  /// Returns statistics of the arena; empty without an arena.
  std::optional<ArenaStats> arena() const;

 private:
  friend class DistributedDataParallelBase;  ///< For join().
  friend struct ShardOutput;

  std::shared_ptr<Impl> impl_;
};

}  // namespace ddpkit
