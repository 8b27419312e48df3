// Tier 1: ATen/core/Tensor.h, through train/main.h.
#pragma once

#include <string>

#include <ddpkit/train/main.h>
#include <ddpkit/train/options.h>

#include "har/model.h"

namespace har {

enum class OptimizerKind { kAdamW, kAdam, kSgd };

enum class Schedule {
  kCosine,    ///< From --lr down to 0 along half a cosine over the run: the last weights are the settled ones.
  kConstant,  ///< --lr throughout.
};

/// What `har --help` lists.
struct TrainOptions {
  ddpkit::train::TrainerOptions trainer = {.epochs = 30, .batch_size = 16, .lr = 1e-3};
  std::string data;  ///< Folder of the data set.
  Mode mode = Mode::kCnn;
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  Schedule schedule = Schedule::kCosine;
  double weight_decay = 0.01;
  double momentum = 0.9;  ///< SGD only.
  double dropout = 0.2;
};

/// Trains and evaluates, on all ranks of the job this process belongs to. Rank 0 prints to stdout, last the line
/// "test accuracy NN.N %". Throws ddpkit::Error.
void train(const TrainOptions& options, ddpkit::train::Program& program);

}  // namespace har
