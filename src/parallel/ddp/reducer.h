// Tier 2: autograd. The reducer's state. reducer.cpp: parameters, buckets, settings; reducer_backward.cpp: a backward.
#pragma once

#include <ddpkit/parallel/reducer.h>

#include <c10/util/ScopeExit.h>

#include <atomic>
#include <functional>
#include <mutex>

#include "parallel/autograd/backward_tracker.h"
#include "parallel/autograd/gradient_hooks.h"
#include "parallel/ddp/backward.h"
#include "parallel/ddp/bucket_storage.h"
#include "parallel/ddp/replica_groups.h"
#include "parallel/ddp/shard_output.h"
#include "parallel/ddp/step_stats.h"
#include "parallel/ddp/used_parameters.h"
#include "parallel/model_agreement.h"
#include "parallel/sharding/parameter_shards.h"
#include "tensor/stream_set.h"

namespace ddpkit {

class Joinable;
class JoinContext;

/// Shared with the hooks, which may outlive the reducer inside a graph.
class Reducer::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options);
  ~Impl();
  static Impl& of(const Reducer& reducer) noexcept { return *reducer.impl_; }

  void install_hooks();
  void remove_hooks() noexcept;
  void prepare_for_forward(bool expects_backward);
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);
  void register_comm_hook(CommHook hook);
  void plan_shards(ShardOutput& output);
  void set_shard_output(const std::shared_ptr<ShardOutput>& output);
  /// Collective. The parameters are sharded. From now on, a bucket has the parameters of one block of a unit.
  void set_parameter_shards(std::shared_ptr<ParameterShards> shards);
  /// Collective. From now on, gradients are sharded over `groups.shards`, and averaged over the replicas too.
  void set_replica_groups(ReplicaGroups groups);
  /// The ranks that share a model.
  const ProcessGroup& shard_group() const noexcept { return replica_groups_.shards; }
  /// Collective. From now on, gradients are copied to buckets of this type, and averaged in it.
  void set_reduce_dtype(at::ScalarType dtype);
  /// Null if each rank has whole parameters.
  std::shared_ptr<ParameterShards> parameter_shards() const;
  /// `write_after`: see StepStats::set_timeline().
  void set_timeline(std::optional<Timeline> timeline, std::uint64_t write_after = 0);
  DistributedDataParallelStats stats() const;
  /// Null outside join().
  void set_join(JoinContext* context, const Joinable& joinable);
  void shadow_bucket();
  void shadow_end_of_backward();
  std::weak_ptr<ShardOutput> shard_output() const {
    const std::lock_guard lock(mutex_);
    return shard_output_;
  }
  /// Throws InvalidArgument if state of the reducer or of an optimizer would be lost with a rank.
  void require_replicas(const char* call) const;
  const std::vector<NamedParameter>& parameters() const noexcept { return parameters_; }
  std::uint64_t backwards() const noexcept { return stats_.backwards(); }
  std::optional<ArenaStats> arena() const { return storage_->arena(); }

  std::atomic<bool> synchronize{true};
  BucketPlan plan;
  int rebuilds = 0;

 private:
  using Clock = Backward::Clock;
  using Phase = Backward::Phase;

  void end_abandoned_backward();
  void require_no_backward(const char* what);
  void follow_shard_output();
  BucketPlan make_plan(const std::vector<std::size_t>& order, bool sharded) const;
  void use_plan(BucketPlan buckets, bool sharded);
  void lay_out();
  void note_arrival(std::size_t index);
  void rebuild();

  void enter_backward();
  void begin(Phase phase);
  void begin_shadow();
  void enter_at_output();
  void end_backward();
  Backward leave_backward() noexcept;
  void reset() noexcept;
  void abort_group(const std::string& where) noexcept;
  void on_gradient(std::size_t index, const at::Tensor& added);
  void note_writer(BucketState& bucket);
  void start_complete_buckets();
  void start_bucket(std::size_t bucket);
  void call_comm_hook(std::size_t bucket);
  auto enter_comm_hook() {
    return c10::make_scope_exit(
        [this, before = std::exchange(backward_.phase, Phase::kInCommHook)] { backward_.phase = before; });
  }
  void note_finished();
  void deliver_early();
  ParameterShards::Reductions reductions();
  std::uint64_t reductions_before() const { return stats_.backwards() * plan.size(); }
  void finish_reductions(std::uint64_t count);
  void drop_gradient(std::size_t index);
  void take_bucket();
  void deliver_taken();
  void finish_backward();
  void agree_on_used();
  /// Averages the shards over the replicas, if the model has replicas. Collective.
  void average_replicas() {
    if (const auto output = shard_output_.lock(); output && replica_groups_.replicas)
      backward_.replica_average.finish(*replica_groups_.replicas, *output);
  }
  void wait_for_result(BucketState& bucket);
  void deliver(std::size_t bucket);
  void deliver_shard(std::size_t bucket);
  void notify(int event);
  double join_factor() const;
  void divide_by_active_ranks();

  ProcessGroup group_;
  ReplicaGroups replica_groups_;  ///< All ranks share one model, unless set_replica_groups() was called.
  ReducerOptions options_;
  std::optional<at::ScalarType> reduce_dtype_;  ///< Empty: the type of the gradients.
  CommHook comm_hook_;
  /// Gradients on several devices arrive on several threads. Recursive: a communication hook may call public functions.
  mutable std::recursive_mutex mutex_;
  std::vector<NamedParameter> parameters_;  ///< The trained parameters. Dense parameters come first. [param]
  std::vector<NamedParameter> dense_;       ///< The dense parameters. [param]
  ParameterAgreement agreement_;
  UsedParameters used_;
  Strides strides_;                                    ///< Of gradients in messages. [param][dimension]
  std::vector<std::optional<std::size_t>> bucket_of_;  ///< Empty for a sparse parameter. [param]
  std::vector<std::size_t> bucket_bytes_;              ///< [bucket]
  std::unique_ptr<BucketStorage> storage_;
  std::optional<GradientHooks> hooks_;  ///< Leaves are parameters. Like the next member, empty only in the constructor.
  std::optional<BackwardTracker> tracker_;
  std::weak_ptr<ShardOutput> shard_output_;
  std::shared_ptr<ParameterShards> parameter_shards_;  ///< Null if each rank has whole parameters.
  Backward backward_;
  std::vector<std::size_t> arrival_order_;  ///< Dense parameters, until the first backward has ended.
  StreamSet last_readers_;                  ///< Streams on which the last backward read gradients from the buckets.
  StreamSet seen_;                          ///< All streams that have used the current memory.
  JoinContext* join_ = nullptr;
  const Joinable* joinable_ = nullptr;
  StepStats stats_;
};

}  // namespace ddpkit
