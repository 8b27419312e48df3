// Tier 0: the standard library only.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ddpkit/train/run_options.h>

#include "har/mode.h"

namespace har {

enum class MultiGpu {
  kNone,        ///< One device.
  kDp,          ///< One process with a replica on each device: ddpkit::DataParallel.
  kDdp,         ///< One process per device, started by the launcher: ddpkit::DistributedDataParallel.
  kLibTorchDp,  ///< LibTorch's own torch::nn::parallel::data_parallel, for comparison; GPUs only.
};

/// The options of `har`.
struct TrainOptions {
  ddpkit::train::RunOptions run = {.epochs = 20, .batch_size = 32};
  std::string data;  ///< Folder of the data set; empty: data/har, a synthetic set.

  MultiGpu multi_gpu = MultiGpu::kDdp;
  std::vector<int> gpu_ids;     ///< GPUs to use, in this order; empty: as many available GPUs as needed.
  std::optional<int> replicas;  ///< CPU replicas of kDp; empty: one per core.

  Mode mode = Mode::kCnn;
  double dropout = 0.2;
  std::string optimizer = "adamw";  ///< Or "adam", "sgd".
  double momentum = 0.9;            ///< SGD only.
};

/// Declares all options. `har` must outlive the parse.
void declare(ddpkit::train::Options& options, TrainOptions& har);

}  // namespace har
