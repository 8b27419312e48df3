// Tier 1: ATen/core/Tensor.h, through train/main.h.
#pragma once

#include <ddpkit/train/main.h>

#include "video/options.h"

namespace video {

/// Trains and evaluates on all ranks of the job. Rank 0 prints to stdout; the last line is "best macro F1 0.NNN (epoch
/// N)". Throws ddpkit::Error.
void train(TrainOptions& options, const ddpkit::train::Options& declared, ddpkit::train::Program& program);

}  // namespace video
