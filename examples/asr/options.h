// Tier 1: ATen/core/Tensor.h, through dataset.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ddpkit/optim/learning_rate.h>
#include <ddpkit/train/config.h>

#include "asr/dataset.h"
#include "asr/model.h"

namespace asr {

struct DataOptions {
  std::string train, dev, test;      ///< Manifests, or folders in LibriSpeech's layout.
  std::vector<std::string> include;  ///< Only utterances whose names begin with one of these; empty: all.
  FaultPolicy on_error = FaultPolicy::kStop;
  int workers = 1;        ///< Threads a rank that put batches together ahead of the model.
  double cache_mb = 512;  ///< MiB of features that each rank keeps in memory.
};

struct TrainingOptions {
  int epochs = 10;
  int batch_size = 32;  ///< Utterances a step, of all ranks together.
  double lr = 1e-3;
  ddpkit::optim::LearningRateScaling lr_scaling = ddpkit::optim::LearningRateScaling::kLinear;
  double warmup_epochs = 1;
  std::string schedule = "cosine";  ///< Or "constant".
  double weight_decay = 0.01;
  double clip_norm = 1;  ///< Largest norm of the gradients; 0: any.
  bool amp = true;       ///< Mixed precision, where the device gains by it.
  bool spec_augment = true;
  SpecAugmentOptions spec = {};
  std::uint64_t seed = 0;
  std::optional<std::int64_t> max_steps;
  int checkpoint_steps = 0;  ///< A checkpoint after each so many steps too, not only after each epoch; 0: none.
};

struct DistributedOptions {
  bool enabled = true;
  std::string backend;  ///< shm, gloo, nccl or hierarchical; empty: chosen by device and hosts.
  bool find_unused_parameters = false;
  bool sync_batchnorm = false;
  /// MiB of a rank's tensors that may come from memory the ranks of a host share: gradients, and what else comes first.
  /// Batches of all lengths would fill any more of it with blocks that fit no later one.
  std::int64_t arena_mb = 512;
};

struct EvaluationOptions {
  int batch_size = 32;             ///< Utterances a step, on each rank.
  int every_epochs = 1;            ///< The dev set is looked at after each so many epochs, and after the last.
  std::string decoder = "greedy";  ///< Or "beam".
  int beam = 16;                   ///< Hypotheses of the beam.
  int samples = 3;                 ///< Transcripts to show beside the truth.
};

struct RunOptions {
  std::string save_dir;
  bool resume = false;
  bool overwrite = false;
  bool json = false;
  bool tensorboard = false;
  int log_steps = 0;  ///< The loss of each so many steps, as a line of its own; 0: none.
};

/// All that a config file may say, by section.
struct Options {
  DataOptions data;
  FeatureOptions features;
  ModelOptions model;
  TrainingOptions training;
  DistributedOptions distributed;
  EvaluationOptions evaluation;
  RunOptions run;
};

/// Reads every key; throws UsageError for one that does not exist or a value that cannot be.
Options read_options(ddpkit::train::Config& config);

/// Keys in which a resumed run may differ from what it was.
std::vector<std::string> may_differ();

}  // namespace asr
