// Tier 2: ddpkit/parallel/distributed_data_parallel.h and the samplers.
#pragma once

#include <torch/nn/module.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/data/length_bucketed_sampler.h>
#include <ddpkit/data/resumable_sampler.h>
#include <ddpkit/optim/join_state.h>
#include <ddpkit/parallel/distributed_data_parallel.h>

namespace ddpkit::optim {

/// Options of Elastic.
struct ElasticOptions {
  /// With fewer ranks, step() and retry() throw PeerLost.
  int min_ranks = 1;
  /// Called on all ranks after each loss, and after new ranks have joined, before training continues. May call
  /// collectives, and may change the learning rate.
  std::function<void(const Regroup&)> on_change = nullptr;
};

/// The samplers that can deal the samples of a lost rank again.
template <class S>
concept ElasticSampler = std::derived_from<S, ResumableSampler> || std::same_as<S, LengthBucketedSampler>;

/// Training that continues in the same processes after the loss of a rank. The remaining ranks drop the step in flight,
/// deal the lost rank's samples among themselves, and continue with weights and optimizer state as they are. The result
/// equals the result of a run that the lost rank leaves at the beginning of that step.
///
///     auto group = ddpkit::init_process_group({.elastic = true});
///     ...
///     ddpkit::optim::Elastic elastic(ddp, sampler, {}, optimizer);
///     for (auto epoch = sampler.epoch(); epoch < epochs; ++epoch) {
///       sampler.set_epoch(epoch);
///       do {
///         for (auto& batch : *loader)
///           if (!elastic.step(batch.target.size(0), [&] { optimizer.zero_grad(); ... optimizer.step(); })) break;
///       } while (elastic.interrupted());
///       elastic.retry([&] { evaluate(group); });
///     }
///
/// Start the ranks with `ddpkit run --min-ranks`; other launchers end all ranks when one fails. With
/// `--max-replacements`, new processes join the others instead of lost ones; see docs/elastic.md. Each sample is
/// used once per epoch, except the usual padding at its end. The gradients are averaged over the ranks that remain: the
/// batch of all ranks becomes smaller. A rank that throws another error, or does not answer until the timeout, ends the
/// run.
class Elastic {
 public:
  class Impl;  ///< Internal.

  /// Collective. All arguments must outlive this object. `objects` are of two kinds, and an object may be of both.
  /// Objects that can be copied return to their old values if a step is dropped: GradScaler, sums of losses. Buffers of
  /// the module and the default generators of the CPU and of the group's device are included. Objects with
  /// save(OutputArchive&) and load(InputArchive&) give new ranks the state of a former rank: the optimizer, which new
  /// ranks need, learning-rate schedulers, GradScaler. Weights, buffers and the position of `sampler` are included.
  ///
  /// On a new rank, returns when it has joined the others, between two of their steps. Its loop begins with
  /// sampler.epoch().
  ///
  /// Throws InvalidArgument if the group was created without InitOptions::elastic, with a communication hook or sharded
  /// parameters, with a ShardedOptimizer that does not survive the loss of a rank (docs/elastic.md), if the group has
  /// lost a rank before, and on a new rank without an optimizer in `objects`.
  template <class M, ElasticSampler Sampler, class... Objects>
  Elastic(DistributedDataParallel<M>& ddp, Sampler& sampler, const ElasticOptions& options = {}, Objects&... objects)
      : Elastic(ddp, ddp.module(), sampler, options, objects...) {}
  /// The same for a wrapper whose type is not known. `module`: the module in the wrapper.
  template <ElasticSampler Sampler, class... Objects>
  Elastic(DistributedDataParallelBase& ddp, torch::nn::Module& module, Sampler& sampler,
          const ElasticOptions& options = {}, Objects&... objects)
      : Elastic(Begin(), ddp, module, sampler, options) {
    (add(objects), ...);
    join((std::is_base_of_v<torch::optim::Optimizer, Objects> || ...));
  }
  ~Elastic();
  Elastic(const Elastic&) = delete;
  Elastic& operator=(const Elastic&) = delete;

  /// Calls `train`: one forward, backward and optimizer step, or several backwards and one optimizer step. It must have
  /// a collective. `samples`: number of this rank's samples in it, the same on all ranks; with a LengthBucketedSampler,
  /// the number of its batches. Returns true if the step is complete. Returns false if a rank was lost, or if new ranks
  /// have joined: then the step is undone on all ranks, and the loader must begin again. Effects beyond the model, such
  /// as logs, belong after the call. Throws Error if `train` changed weights before the collective that failed.
  bool step(std::int64_t samples, const std::function<void()>& train);
  /// Returns whether the last step() returned false. Then returns false.
  bool interrupted() noexcept;
  /// Calls `action`, and again after each loss of a rank: evaluation, checkpoints. All ranks repeat it, or none.
  void retry(const std::function<void()>& action);
  /// Returns the number of complete steps.
  std::int64_t steps() const noexcept;

 private:
  struct Begin {};
  Elastic(Begin begin, DistributedDataParallelBase& ddp, torch::nn::Module& module, ResumableSampler& sampler,
          const ElasticOptions& options);
  Elastic(Begin begin, DistributedDataParallelBase& ddp, torch::nn::Module& module, LengthBucketedSampler& sampler,
          const ElasticOptions& options);

  template <class T>
  void add(T& object) {
    constexpr bool has_state =
        requires(T & t, torch::serialize::OutputArchive & out, torch::serialize::InputArchive & in) {
      t.save(out);
      t.load(in);
    };
    static_assert(std::copyable<T> || has_state, "the object can neither be copied nor saved and loaded");
    if constexpr (std::copyable<T>) {
      auto saved = std::make_shared<T>(object);
      add([&object, saved] { *saved = object; }, [&object, saved] { object = *saved; });
    }
    if constexpr (has_state) state().add(object);
  }
  void add(std::function<void()> save, std::function<void()> roll_back);
  JoinState& state() noexcept;
  void join(bool has_optimizer);

  std::unique_ptr<Impl> impl_;
};

}  // namespace ddpkit::optim
