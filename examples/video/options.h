// Tier 0: the standard library only. CLI11 is declared, not included.
#pragma once

#include <string>
#include <vector>

#include <ddpkit/optim/learning_rate.h>
#include <ddpkit/train/options.h>

#include "video/check.h"
#include "video/generate.h"
#include "video/trials.h"

namespace video {

/// The handling of classes with few trials.
enum class Balance {
  kNone,
  kLoss,     ///< Each clip's loss is weighted by the inverse number of trials of its class.
  kSampler,  ///< Clips are drawn with these weights, with replacement.
};

/// The options of `video`.
struct TrainOptions {
  ddpkit::train::TrainerOptions trainer = {.epochs = 90, .batch_size = 8, .lr = 1e-3};

  std::string data;  ///< Folder with trials.csv and videos.
  std::vector<std::string> classes;
  FrameSize size = {256, 256};
  int frames = 17;
  double validation_share = 0.2;
  OnBadData on_bad_data = OnBadData::kStop;
  Check check = Check::kDecode;
  bool repeat_frame = false;  ///< Control experiment: each clip repeats its middle frame.

  int num_workers = 1;      ///< Decoding threads per rank.
  int prefetch_factor = 2;  ///< Batches that each thread decodes in advance.
  int open_videos = 32;
  std::string cache_dir;
  int cache_mb = 4096;  ///< Over all ranks of a host.

  Balance balance = Balance::kLoss;
  double weight_decay = 0.01;
  ddpkit::optim::LearningRateScaling lr_scaling = ddpkit::optim::LearningRateScaling::kNone;
  int warmup_epochs = 2;
  bool augment = true;
  bool sync_batch_norm = false;
  bool amp = false;
  double dropout = 0.2;
  int width = 16;

  bool tensorboard = true;  ///< If the run has a folder.
};

/// Adds all options to a program. `options` must outlive the parse.
void add_train_options(CLI::App& app, TrainOptions& options);

/// Adds the command `generate`. `folder` and `options` must outlive the parse.
CLI::App* add_generate_command(CLI::App& app, std::string& folder, GenerateOptions& options);

/// Returns the value's name on the command line.
const char* name_of(Balance value);
const char* name_of(OnBadData value);
const char* name_of(Check value);
const char* name_of(ddpkit::optim::LearningRateScaling value);
std::string name_of(FrameSize size);

}  // namespace video
