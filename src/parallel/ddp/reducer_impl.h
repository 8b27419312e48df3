// Tier 2: torch/csrc/autograd/function.h. The reducer's state, and what its sources are:
//   reducer.cpp              parameters, their hooks, settings
//   reducer_agreement.cpp    what ranks have agreed on
//   reducer_plan.cpp         which gradient is in which bucket
//   reducer_backward.cpp     one backward: gradients come, buckets are reduced and handed on
//   reducer_graph_tasks.cpp  begin and end of a backward
//   reducer_join.cpp         a backward of a rank without inputs
//   reducer_stats.cpp        what happened
#pragma once

#include <ddpkit/parallel/reducer.h>

#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <functional>
#include <mutex>

#include <ddpkit/parallel/bucket_plan.h>

#include "parallel/autograd/backward_tracker.h"
#include "parallel/autograd/gradient_hooks.h"
#include "parallel/ddp/gradient_memory.h"
#include "parallel/ddp/used_parameters.h"
#include "tensor/stream_set.h"

namespace ddpkit {

/// Shared with the hooks, which may outlive the reducer inside a graph.
class Reducer::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options);
  ~Impl();

  void install_hooks();
  void follow_parameters();
  void remove_hooks() noexcept;
  void set_comm_hook(CommHook hook);
  void expect_gradients_of(const std::vector<at::Tensor>& outputs);
  void set_gradient_sink(GradientSink& sink);
  void remove_gradient_sink(const GradientSink& sink) noexcept;
  SinkRegistration::State state_of(const GradientSink& sink) const;
  const std::vector<NamedParameter>& parameters() const noexcept { return parameters_; }
  void set_timeline(std::optional<Timeline> timeline, std::uint64_t write_after);
  void note_outputs(const std::vector<at::Tensor>& outputs);
  DistributedDataParallelStats stats() const;
  void set_join(JoinSession* session, int index);
  void shadow_bucket();
  void shadow_end_of_backward();
  std::optional<ArenaStats> arena() const { return memory_->arena(); }

  std::atomic<bool> synchronize{true};
  std::vector<std::vector<std::size_t>> plan;  ///< [bucket][position]
  std::optional<BackwardTrace> trace;
  std::uint64_t backwards = 0;
  int rebuilds = 0;

 private:
  using Clock = std::chrono::steady_clock;
  void end_abandoned_backward();
  void follow_sink();

  /// Of a parameter, as all ranks had it when the model was wrapped.
  struct Agreed {
    at::ScalarType dtype;
    at::Device device;
    std::vector<std::int64_t> sizes;
  };
  struct Bucket {
    std::size_t bytes = 0;
    std::size_t pending = 0;  ///< Expected gradients that are not there yet.
    Work work;
    std::function<at::Tensor()> finish;
    BucketTiming timing;
    StreamSet writers;                       ///< On which its gradients came in this backward.
    std::optional<c10::Stream> stream = {};  ///< On which it was launched; empty on the CPU.
    explicit Bucket(c10::Device device) : writers(device) {}
  };

  std::vector<ParameterInfo> infos() const;
  void make_plan(const std::vector<std::size_t>& order);
  void tell_plan(const std::string& what) const;
  void note_agreement();
  void check_agreement() const;
  void follow_strides();
  GradientMemory::Strides agree_on_strides() const;
  void lay_out();

  void on_gradient(std::size_t index, const at::Tensor& added);
  void enter_backward();
  void begin_backward();
  void enter_at_output();
  void launch_complete_buckets();
  void feed_sink();
  void launch(std::size_t bucket);
  void end_backward();
  void finish_backward();
  void finish_dense();
  void finish_bucket(std::size_t bucket);
  void take_result(Bucket& bucket);
  void note_writer(Bucket& bucket);
  void agree_on_used();
  void hand_over(std::size_t bucket);
  void note_finished();
  void note_step();
  void record_step();
  void rebuild();
  void announce(int event);
  double join_factor() const;
  void divide_by_active_ranks();
  void begin_shadow();
  void note_arrival(std::size_t index);
  void leave_backward() noexcept;
  void forget_backward() noexcept;
  void give_up(const std::string& where) noexcept;

  ProcessGroup group_;
  ReducerOptions options_;
  CommHook comm_hook_;
  /// Gradients on several devices come from several threads. Recursive: a communication hook may call public functions.
  mutable std::recursive_mutex mutex_;
  std::vector<NamedParameter> frozen_;      ///< Parameters that wanted no gradient when the model was wrapped.
  std::vector<NamedParameter> parameters_;  ///< The others. Dense ones come first. [param]
  std::size_t dense_ = 0;                   ///< Their number. A dense parameter has the same index in memory_.
  std::vector<Agreed> agreed_;              ///< [param]
  UsedParameters used_;
  std::vector<std::optional<std::size_t>> bucket_of_;  ///< Empty for a sparse parameter. [param]
  std::vector<Bucket> buckets_;                        ///< [bucket]
  std::unique_ptr<GradientMemory> memory_;
  std::optional<GradientHooks> hooks_;  ///< Leaves are parameters. Empty only in the constructor, as the next.
  std::optional<BackwardTracker> tracker_;
  GradientSink* sink_ = nullptr;
  std::size_t next_bucket_ = 0;    ///< Buckets are reduced in this order on every rank, whatever order they fill in.
  std::size_t next_finished_ = 0;  ///< The first bucket that has not been seen to be over.
  std::size_t next_taken_ = 0;     ///< The first bucket whose result has not been taken.
  bool in_backward_ = false;
  bool in_hook_ = false;               ///< The communication hook runs.
  std::vector<std::size_t> arrivals_;  ///< Dense parameters in the order their gradients came in the first backward.
  StreamSet last_readers_;             ///< On which the last backward took gradients out of the buckets.
  StreamSet seen_;                     ///< All that have worked on the memory there is.
  JoinSession* join_ = nullptr;
  int join_index_ = 0;
  bool shadows_ = false;  ///< This rank has run out of inputs.
  Clock::time_point first_gradient_;
  Clock::time_point last_gradient_;
  std::uint64_t bytes_ = 0, sent_bytes_ = 0;  ///< Over all synchronised backwards, as the next two.
  Clock::duration communication_{}, hidden_{};
  std::optional<Timeline> timeline_;
  std::uint64_t write_timeline_after_ = 0;  ///< Backwards that are left to be recorded; 0: the caller writes it.
  Clock::time_point reached_output_;        ///< When backward came to an output of forward; only with a timeline.
};

}  // namespace ddpkit
