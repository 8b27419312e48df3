// Tier 2: torch/nn/module.h.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/parallel/distributed_data_parallel.h>
#include <ddpkit/train/run.h>

#include "clstm_ppo/options.h"
#include "clstm_ppo/report.h"
#include "clstm_ppo/rollout.h"

namespace clstm_ppo {

/// The model and its training: PPO's passes over the episodes of all ranks, in minibatches of sequences.
class Learner {
 public:
  /// Collective. `model` must already be on its device. `run` provides precision and schedule, and must be started
  /// before learn().
  Learner(const TrainOptions& options, std::shared_ptr<CascadedLSTM> model, ddpkit::train::Run& run,
          const ddpkit::ProcessGroup& group);

  /// Makes --ppo-epochs passes over `rollout`, this rank's part. Each update uses the mean loss over --grad-accum-steps
  /// minibatches of all ranks and exchanges gradients once. The order of the sequences is drawn from `random`. Each
  /// sequence starts with the memory that the model had when it acted. Calls `after_step` after each update. `round`
  /// may end earlier. Collective.
  UpdateMetrics learn(const Rollout& rollout, at::Generator random, ddpkit::train::Epoch& round,
                      const std::function<void()>& after_step);

  CascadedLSTM& model() const noexcept { return *model_; }
  torch::optim::Optimizer& optimizer() noexcept { return optimizer_; }
  ddpkit::DistributedDataParallelBase& wrapper() noexcept { return ddp_; }
  std::int64_t updates_per_round() const { return options_.ppo_epochs * updates_; }

 private:
  struct Sequences;

  PpoLoss loss_of(const Sequences& sequences, const at::Tensor& which);

  TrainOptions options_;
  ddpkit::ProcessGroup group_;
  ddpkit::train::Run& run_;
  std::shared_ptr<CascadedLSTM> model_;
  ddpkit::DistributedDataParallel<CascadedLSTM> ddp_;
  ddpkit::optim::FusedAdam optimizer_;
  std::int64_t batch_;    // Sequences per minibatch.
  std::int64_t batches_;  // Per pass.
  std::int64_t updates_;  // Per pass.
};

}  // namespace clstm_ppo
