// Tier 1: ATen/core/Tensor.h, through process_group.h.
#pragma once

#include <ddpkit/comm/process_group.h>

namespace asr {

/// Tests a distributed setup, also with one rank: the hosts of the ranks, the collectives, and that
/// DistributedDataParallel gives all ranks the gradient that one process would compute. Rank 0 prints a line per test.
/// Collective. Throws Error at the first failure.
void check(const ddpkit::ProcessGroup& group);

}  // namespace asr
