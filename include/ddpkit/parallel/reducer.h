// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
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

/// One bucket in the last synchronised backward. Times are microseconds since that backward's first gradient, by the
/// host's clock: on a GPU, which lags behind the host, they say when work was queued, and nothing is waited for to know
/// more.
struct BucketStats {
  std::size_t parameters = 0;  ///< Whose gradients it holds.
  std::size_t bytes = 0;       ///< Of gradients.
  std::size_t sent_bytes = 0;  ///< Handed to collectives: fewer than `bytes` where a communication hook compresses.
  double ready_us = 0;         ///< Its last gradient was there.
  double started_us = 0;       ///< Its reduction was handed to the backend.
  double done_us = 0;          ///< Its reduction was seen to be over: looked for at each gradient and at the end.
};

/// What DistributedDataParallel has done so far, on this rank. A step is a synchronised backward. Dense gradients only:
/// sparse ones are gathered when backward ends, and belong to no bucket.
struct DistributedDataParallelStats {
  std::uint64_t steps = 0;       ///< Synchronised backwards.
  int rebuilds = 0;              ///< How often the buckets were laid out anew.
  std::uint64_t bytes = 0;       ///< Of gradients, over all steps.
  std::uint64_t sent_bytes = 0;  ///< Handed to collectives by this rank, over all steps. 0 in a world of one.
  /// Time in which a bucket was under way, over all steps, and the part of it that lies before the last gradient. 0 on
  /// a GPU: see BucketStats.
  double communication_us = 0;
  double hidden_us = 0;

  std::vector<BucketStats> buckets = {};  ///< Of the last step, in the order they are reduced. [bucket]
  double last_gradient_us = 0;            ///< Of the last step: since its first gradient.
  double end_us = 0;                      ///< All gradients were reduced.

  /// Of the communication, the share that backward hid: 0 to 1. 0 before the first step.
  double hidden_share() const noexcept { return communication_us > 0 ? hidden_us / communication_us : 0; }
};

/// A parameter under its name in the module.
struct NamedParameter {
  std::string name;     ///< Such as "features.0.weight".
  at::Tensor tensor;    ///< The parameter itself.
  bool sparse = false;  ///< Its gradient is a sparse tensor.
};

/// DistributedDataParallelOptions in bytes: its names and meanings.
struct ReducerOptions {
  std::size_t first_bucket_bytes = std::size_t{1} << 20;
  std::size_t bucket_bytes = std::size_t{25} << 20;
  bool find_unused_parameters = false;
  bool static_graph = false;
  bool gradient_as_bucket_view = false;
  bool arena = true;
  std::optional<std::size_t> arena_bytes = std::nullopt;
};

/// Receives averaged gradients from a Reducer, as shards. The parameters are then left without a gradient.
class ShardOutput {
 public:
  enum class State {
    kActive,
    kReplaced,   ///< The reducer has a newer output.
    kNoReducer,  ///< The reducer has been destroyed, or a newer reducer averages its parameters.
  };
  virtual ~ShardOutput() = default;
  /// A forward pass begins. Parameters may have new memory since the last forward pass. Not collective.
  virtual void follow_parameters() = 0;
  /// The first bucket of a backward is about to be reduced, at the same place in the order of collectives on all ranks.
  virtual void begin() = 0;
  /// A bucket has been reduced on all ranks. `shards[i]` is this rank's part of the averaged gradient of parameter
  /// `parameters[i]`, one-dimensional, in the order of the parameter's memory.
  virtual void receive(const std::vector<std::size_t>& parameters, std::vector<at::Tensor> shards) = 0;
};

/// Averages gradients over ranks while backward runs. Hooks on the parameters' gradient accumulators take each gradient
/// as autograd makes it; a full bucket's all-reduce starts at once; the end of backward waits for the last.
///
/// Backward must give every parameter a gradient, in each rank, unless unused parameters are allowed for; it throws on
/// this rank, and tells the others, when it does not. One backward at a time. The parameters must outlive the reducer's
/// last backward.
///
/// A parameter has one reducer: the newest. The next forward pass through an older one throws InvalidArgument.
class Reducer {
  class Impl;

 public:
  /// Collective. Averages gradients of `parameters` with requires_grad; each is listed once, the same on all ranks.
  Reducer(std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options = {});
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Before a forward pass: hooks parameters again if their autograd objects have been replaced, as by torch::load().
  /// Throws ModelMismatch for a parameter that has been cast, moved, resized or unfrozen since the construction.
  /// `expects_backward`: a backward will follow, so that all ranks run this forward pass.
  void prepare_for_forward(bool expects_backward);

  /// False: backward leaves gradients local, to accumulate until the next synchronised backward.
  void set_synchronize(bool synchronize) noexcept;
  bool synchronize() const noexcept;  ///< As set_synchronize() said; true at first.

  /// Collective, not within backward. From the next backward on `hook` reduces the buckets; sparse gradients it does
  /// not see. An empty hook brings the all-reduce back.
  void set_comm_hook(CommHook hook);

  /// Collective, not within backward. From the next backward on each rank receives only its shard of each averaged
  /// gradient (a reduce-scatter), which is passed to `output` at once. Gradients of parameters that no rank has used
  /// are not passed. The output replaces an earlier one. The reducer does not keep it alive: after its end, the next
  /// forward pass or backward all-reduces again. Returns a function that reports the output's state. Throws
  /// InvalidArgument, and changes nothing, for sparse gradients or with a communication hook.
  [[nodiscard]] std::function<ShardOutput::State()> set_shard_output(const std::shared_ptr<ShardOutput>& output);
  /// All parameters, as a ShardOutput counts them. [param]
  std::vector<NamedParameter> parameters() const;

  /// After a forward pass, which returned `outputs`. If a synchronised backward follows and they depend on no
  /// parameter, a backward through them counts as one in which this rank used none. With find_unused_parameters,
  /// buckets do not wait for parameters that `outputs` do not depend on; the outputs of several forwards before one
  /// backward add up. Without a call, unused parameters are known only when backward ends. A timeline has backward from
  /// where it reaches one of `outputs`, without a call from its first gradient.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);

  /// From now on each synchronised backward is recorded: itself, its buckets, its waits. An empty one ends that.
  /// `write_after`: after so many backwards it is written and set no more, on all ranks alike; 0: the caller writes it.
  void set_timeline(std::optional<Timeline> timeline, std::uint64_t write_after = 0);

  /// Parameter indices by bucket, in the order buckets are reduced. [bucket][position]
  const std::vector<std::vector<std::size_t>>& buckets() const noexcept;
  /// Synchronised backwards so far.
  std::uint64_t backwards() const noexcept;
  /// See DistributedDataParallelStats.
  DistributedDataParallelStats stats() const;
  /// Empty without an arena.
  std::optional<ArenaStats> arena() const;

 private:
  friend class DistributedDataParallelBase;  ///< Within join().

  std::shared_ptr<Impl> impl_;
};

}  // namespace ddpkit
