// Tier 0: the standard library only.
#pragma once

#include <string>
#include <vector>

#include <ddpkit/train/run_options.h>

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
  /// On the CPU, train() sets a batch size that is not given to 8.
  ddpkit::train::RunOptions run = {.epochs = 100, .batch_size = 128, .warmup_epochs = 2, .num_workers = 4};

  std::string data;  ///< Folder with trials.csv and videos; empty: data/mouse, a synthetic set.
  std::vector<std::string> classes;
  FrameSize size = {256, 256};
  int frames = 17;
  double validation_share = 0.2;
  OnBadData on_bad_data = OnBadData::kStop;
  Check check = Check::kDecode;
  bool repeat_frame = false;  ///< Control experiment: each clip repeats its middle frame.

  int prefetch_factor = 2;  ///< Batches that each worker decodes in advance.
  int open_videos = 32;
  std::string cache_dir;
  int cache_mb = 4096;  ///< Over all ranks of a host.

  Balance balance = Balance::kLoss;
  bool augment = true;
  double dropout = 0.2;
  int width = 16;
};

/// Declares all options. `video` must outlive the parse.
void declare(ddpkit::train::Options& options, TrainOptions& video);

/// Declares the options of the command `generate`. `folder` and `set` must outlive the parse.
void declare(ddpkit::train::Options& options, std::string& folder, GenerateOptions& set);

}  // namespace video
