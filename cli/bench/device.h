// Tier 0: c10/core headers only.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include <ddpkit/comm/environment.h>

namespace ddpkit::bench {

/// Returns the device of this rank for `--device` ("cpu" or "cuda"). On the CPU, pins the calling thread to one core if
/// `pin` is set and there are enough cores. On a GPU it does not pin, because autograd and NCCL have further threads.
c10::Device place_rank(const std::string& device, const LaunchEnvironment& environment, bool pin);

/// Returns the number of ranks that a command measures: `asked` if not 0, else 2 on the CPU and the number of GPUs on
/// CUDA. Throws InvalidArgument if there are fewer GPUs than ranks.
int ranks_on(const std::string& device, int asked);

}  // namespace ddpkit::bench
