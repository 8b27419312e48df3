// Tier 2: torch/nn/module.h, through options.h.
#pragma once

#include <string>

#include <ddpkit/comm/process_group.h>

#include "asr/options.h"

namespace asr {

/// Trains on all ranks of the job. `declared`: of declare(). Rank 0 prints to stdout; after the last epoch, also the
/// number of skipped files. Throws ddpkit::Error.
void train(Options& options, const ddpkit::train::Options& declared, const ddpkit::ProcessGroup& group);

}  // namespace asr
