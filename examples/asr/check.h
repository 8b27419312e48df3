// Tier 1: ATen/core/Tensor.h, through process_group.h.
#pragma once

#include <ddpkit/comm/process_group.h>

namespace asr {

/// Tests a distributed set-up, with one rank as well: who is there, the collectives, and that DistributedDataParallel
/// gives all ranks the gradient that one process would compute. Rank 0 prints a line a test. Collective. Throws Error
/// on the first that fails.
void check(const ddpkit::ProcessGroup& group);

}  // namespace asr
