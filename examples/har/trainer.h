// Tier 1: ATen/core/Tensor.h, through train/main.h.
#pragma once

#include <ddpkit/train/main.h>

#include "har/options.h"

namespace har {

/// Trains and evaluates on all ranks of the job. `declared`: of declare(options). Rank 0 prints to stdout; the last
/// line is "test accuracy NN.N %". Throws ddpkit::Error.
void train(TrainOptions& options, const ddpkit::train::Options& declared, ddpkit::train::Program& program);

}  // namespace har
