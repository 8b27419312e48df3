// Tier 1: ATen/core/Tensor.h, through train/main.h.
#pragma once

#include <ddpkit/train/main.h>

#include "gpt/options.h"

namespace gpt {

/// Trains on all ranks of the job, then writes text. `declared`: of declare(). Rank 0 prints to stdout; the last line
/// is "validation loss N.NNNN". Throws ddpkit::Error.
void train(TrainOptions& options, const ddpkit::train::Options& declared, ddpkit::train::Program& program);

}  // namespace gpt
