// Tier 1: ATen/core/Tensor.h, through dataset.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ddpkit/train/run_options.h>

#include "asr/dataset.h"
#include "asr/model.h"

namespace asr {

struct DataOptions {
  std::string train, dev, test;      ///< Manifests, or folders in LibriSpeech's layout.
  std::vector<std::string> include;  ///< Only utterances whose names begin with one of these prefixes; empty: all.
  FaultPolicy on_bad_data = FaultPolicy::kStop;
  double cache_mb = 512;  ///< MiB of features that each rank caches.
};

struct EvaluationOptions {
  int batch_size = 32;             ///< Utterances per step, on each rank.
  int eval_every = 1;              ///< Evaluates the dev set after each N epochs, and after the last.
  std::string decoder = "greedy";  ///< Or "beam".
  int beam = 16;                   ///< Hypotheses in the beam.
  int samples = 3;                 ///< Number of transcripts to print with their references.
};

/// All options.
struct Options {
  ddpkit::train::RunOptions run = {.batch_size = 32,  ///< Utterances per update, over all ranks.
                                   .lr_scaling = ddpkit::optim::LearningRateScaling::kLinear,
                                   .warmup_epochs = 1,
                                   .max_grad_norm = 1,
                                   .num_workers = 1,
                                   .launch = {.num_gpus = -1}};
  DataOptions data;
  FeatureOptions features;
  ModelOptions model;  ///< Use model_options(), which adds the number of bands.
  bool spec_augment = true;
  SpecAugmentOptions spec = {};
  bool distributed = true;
  bool find_unused_parameters = false;
  /// MiB of a rank's tensors (gradients and earlier allocations) in memory that the ranks of a host share. Batches of
  /// all lengths would fill a larger arena with blocks that later batches cannot reuse.
  std::int64_t arena_mb = 512;
  EvaluationOptions evaluation;
};

/// Declares all options. `asr` must outlive the parse.
void declare(ddpkit::train::Options& options, Options& asr);

/// Returns the options of the model. Throws UsageError if the model has no convolution.
ModelOptions model_options(const Options& options);

}  // namespace asr
