// Tier 0: c10/core headers only.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include <ddpkit/comm/environment.h>

namespace ddpkit::bench {

/// Where `--device` ("cpu" or "cuda") puts this rank. On the CPU it pins the calling thread to a core of its own, if it
/// is to (`pin`) and there are enough; beside a GPU more threads are at work than one: autograd's, NCCL's.
c10::Device place_rank(const std::string& device, const LaunchEnvironment& environment, bool pin);

/// How many ranks a command measures: `asked`, if any; else two on CPUs, and as many as there are GPUs. Throws
/// InvalidArgument when there are fewer GPUs than ranks.
int ranks_on(const std::string& device, int asked);

}  // namespace ddpkit::bench
