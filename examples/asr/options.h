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
  std::vector<std::string> include;  ///< Only utterances whose names begin with one of these prefixes; empty: all.
  FaultPolicy on_error = FaultPolicy::kStop;
  int workers = 1;        ///< Threads per rank that prepare batches in advance.
  double cache_mb = 512;  ///< MiB of features that each rank caches.
};

struct TrainingOptions {
  int epochs = 10;
  int batch_size = 32;  ///< Utterances per step, over all ranks.
  double lr = 1e-3;
  ddpkit::optim::LearningRateScaling lr_scaling = ddpkit::optim::LearningRateScaling::kLinear;
  double warmup_epochs = 1;
  std::string schedule = "cosine";  ///< Or "constant".
  double weight_decay = 0.01;
  double clip_norm = 1;  ///< Largest norm of the gradients; 0: no limit.
  bool amp = true;       ///< Mixed precision, if the device supports it efficiently.
  bool spec_augment = true;
  SpecAugmentOptions spec = {};
  std::uint64_t seed = 0;
  std::optional<std::int64_t> max_steps;
  int checkpoint_steps = 0;  ///< Writes a checkpoint after each N steps, in addition to each epoch; 0: none.
};

struct DistributedOptions {
  bool enabled = true;
  std::string backend;  ///< shm, gloo, nccl or hierarchical; empty: chosen by device and hosts.
  bool find_unused_parameters = false;
  bool sync_batchnorm = false;
  /// MiB of a rank's tensors (gradients and earlier allocations) in memory that the ranks of a host share. Batches of
  /// all lengths would fill a larger arena with blocks that later batches cannot reuse.
  std::int64_t arena_mb = 512;
};

struct EvaluationOptions {
  int batch_size = 32;             ///< Utterances per step, on each rank.
  int every_epochs = 1;            ///< Evaluates the dev set after each N epochs, and after the last.
  std::string decoder = "greedy";  ///< Or "beam".
  int beam = 16;                   ///< Hypotheses in the beam.
  int samples = 3;                 ///< Number of transcripts to print with their references.
};

struct RunOptions {
  std::string save_dir;
  bool resume = false;
  bool overwrite = false;
  bool json = false;
  bool tensorboard = false;
  int log_steps = 0;  ///< Prints the loss every N steps; 0: never.
};

/// All options of a config file, by section.
struct Options {
  DataOptions data;
  FeatureOptions features;
  ModelOptions model;
  TrainingOptions training;
  DistributedOptions distributed;
  EvaluationOptions evaluation;
  RunOptions run;
};

/// Reads every key. Throws UsageError for an unknown key or an invalid value.
Options read_options(ddpkit::train::Config& config);

/// Returns the keys that a resumed run may change.
std::vector<std::string> may_differ();

}  // namespace asr
