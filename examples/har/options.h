// Tier 0: the standard library only. CLI11 is declared, not included.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ddpkit/optim/learning_rate.h>
#include <ddpkit/train/options.h>

#include "har/mode.h"

namespace har {

enum class MultiGpu {
  kNone,        ///< One device.
  kDp,          ///< One process with a replica on each device: ddpkit::DataParallel.
  kDdp,         ///< One process per device, started by the launcher: ddpkit::DistributedDataParallel.
  kLibTorchDp,  ///< LibTorch's own torch::nn::parallel::data_parallel, for comparison; GPUs only.
};

enum class OptimizerKind { kAdamW, kAdam, kSgd };

enum class LrSchedule {
  kCosine,    ///< From --lr to 0 along half a cosine over the run.
  kConstant,  ///< Constant --lr.
};

/// The options of `har`.
struct TrainOptions {
  ddpkit::train::TrainerOptions trainer = {.epochs = 30, .batch_size = 16, .lr = 1e-3};
  std::string data;  ///< Folder of the data set.

  MultiGpu multi_gpu = MultiGpu::kDdp;
  std::vector<int> gpu_ids;     ///< GPUs to use, in this order; empty: as many available GPUs as needed.
  std::optional<int> replicas;  ///< CPU replicas of kDp; empty: one per core.

  Mode mode = Mode::kCnn;
  double dropout = 0.2;
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  double weight_decay = 0.01;
  double momentum = 0.9;  ///< SGD only.
  LrSchedule lr_schedule = LrSchedule::kCosine;
  ddpkit::optim::LearningRateScaling lr_scaling = ddpkit::optim::LearningRateScaling::kNone;
  int warmup_epochs = 0;
  int grad_accum_steps = 1;  ///< Batches per device and update.
  int num_workers = 0;       ///< Threads per rank that prepare batches.
  bool amp = true;           ///< Mixed precision, if the device supports it efficiently.
  bool profile = false;      ///< Writes a trace of all ranks to the run folder.
  bool tensorboard = false;  ///< Writes TensorBoard events to the run folder.
};

/// Adds all options to a program. `options` must outlive the parse.
void add_train_options(CLI::App& app, TrainOptions& options);

/// Returns the value's name on the command line.
const char* name_of(MultiGpu value);
const char* name_of(Mode value);
const char* name_of(OptimizerKind value);
const char* name_of(LrSchedule value);
const char* name_of(ddpkit::optim::LearningRateScaling value);

}  // namespace har
