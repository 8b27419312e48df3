// Tier 2: torch/nn/module.h, through rollout.h.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/train/main.h>

#include "clstm_ppo/options.h"
#include "clstm_ppo/report.h"
#include "clstm_ppo/rollout.h"

namespace clstm_ppo {

/// Trains CLSTM-PPO (J. Zou and others, arXiv 2212.02721) on all ranks of a job. In a round each rank runs --envs
/// episodes, with a seed of its own, from random days of the training period; then all learn from all of them.
///
///     DistributedCLSTMPPOTrainer trainer(options, program);
///     trainer.initialize();
///     trainer.train();
///
/// Every function is collective. Rank 0 alone prints and writes files.
class DistributedCLSTMPPOTrainer {
 public:
  /// Joins the job that the launcher describes in the environment, on GPU number local_rank of --num-gpus or on the
  /// CPU. Throws ddpkit::train::UsageError for options that do not fit together, and for more ranks than GPUs.
  DistributedCLSTMPPOTrainer(const TrainOptions& options, ddpkit::train::Program& program);
  /// In a group that is there already.
  DistributedCLSTMPPOTrainer(const TrainOptions& options, const ddpkit::ProcessGroup& group);
  ~DistributedCLSTMPPOTrainer();
  DistributedCLSTMPPOTrainer(const DistributedCLSTMPPOTrainer&) = delete;
  DistributedCLSTMPPOTrainer& operator=(const DistributedCLSTMPPOTrainer&) = delete;

  /// Reads the prices, makes the model (the same weights on every rank) and its optimizer, and goes on with the run in
  /// --save-dir where there is one. Throws ddpkit::InvalidArgument, on all ranks, for what is wrong with the data.
  void initialize();

  /// Runs all rounds that are left, each followed by a checkpoint, and at the end shows how the policy does on the days
  /// it has never seen. SIGINT or SIGTERM to any rank ends it within a round, of which nothing is kept.
  void train();

  /// This rank's episodes of the next round, with its own exploration.
  Rollout run_episode();

  /// PPO on the episodes of all ranks: updates the weights, which stay the same on every rank, then the statistics of
  /// the observations.
  UpdateMetrics update(const Rollout& rollout);

  /// Means over the episodes of all ranks.
  EpisodeMetrics gather_metrics(const Rollout& rollout) const;

  /// Rank 0 writes SAVE_DIR/checkpoint.pt, whole or not at all, behind the training's back; all ranks wait until it
  /// holds a copy of the state. train() returns when the last one is on the disk. Nothing without --save-dir.
  void save_checkpoint();

  /// Of the policy's mean action on the days that training never sees. Rank 0's, on every rank.
  TestResult evaluate() const;

  /// Called after each step of the optimizer.
  void set_update_hook(std::function<void()> hook);

  std::int64_t rounds() const;  ///< In all.
  std::int64_t round() const;   ///< Finished.
  CascadedLSTM& model();
  const RunningNormalizer& normalizer() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace clstm_ppo
