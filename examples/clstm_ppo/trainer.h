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

/// Trains CLSTM-PPO (J. Zou and others, arXiv 2212.02721) on all ranks of a job. In each round, each rank runs --envs
/// episodes from random days of the training period, with a different seed per rank. Then all ranks learn from all
/// episodes.
///
///     DistributedCLSTMPPOTrainer trainer(options, program);
///     trainer.initialize();
///     trainer.train();
///
/// All functions are collective. Only rank 0 prints and writes files.
class DistributedCLSTMPPOTrainer {
 public:
  /// Joins the job that the launcher describes in the environment, on GPU local_rank of --num-gpus or on the CPU.
  /// Throws ddpkit::train::UsageError for options that exclude each other, and for more ranks than GPUs.
  DistributedCLSTMPPOTrainer(const TrainOptions& options, ddpkit::train::Program& program);
  /// Uses an existing group.
  DistributedCLSTMPPOTrainer(const TrainOptions& options, const ddpkit::ProcessGroup& group);
  ~DistributedCLSTMPPOTrainer();
  DistributedCLSTMPPOTrainer(const DistributedCLSTMPPOTrainer&) = delete;
  DistributedCLSTMPPOTrainer& operator=(const DistributedCLSTMPPOTrainer&) = delete;

  /// Reads the prices, creates the model (the same weights on each rank) and its optimizer. If --save-dir holds a run,
  /// resumes it. Throws ddpkit::InvalidArgument on all ranks for invalid data.
  void initialize();

  /// Runs all remaining rounds and writes a checkpoint after each. Finally evaluates the policy on the held-out days.
  /// SIGINT or SIGTERM to any rank stops the training within a round and discards that round.
  void train();

  /// Runs this rank's episodes of the next round, with a different exploration per rank.
  Rollout run_episode();

  /// Runs PPO on the episodes of all ranks. Updates the weights, which remain equal on all ranks, then the statistics
  /// of the observations.
  UpdateMetrics update(const Rollout& rollout);

  /// Means over the episodes of all ranks.
  EpisodeMetrics gather_metrics(const Rollout& rollout) const;

  /// Rank 0 writes SAVE_DIR/checkpoint.pt atomically in the background. All ranks wait until rank 0 has a copy of the
  /// state. train() returns after the last checkpoint is on disk. Does nothing without --save-dir.
  void save_checkpoint();

  /// Evaluates the policy's mean action on the held-out days. Returns rank 0's result on each rank.
  TestResult evaluate() const;

  /// `hook` is called after each optimizer step.
  void set_update_hook(std::function<void()> hook);

  std::int64_t rounds() const;  ///< Total rounds.
  std::int64_t round() const;   ///< Finished rounds.
  CascadedLSTM& model();
  const RunningNormalizer& normalizer() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace clstm_ppo
