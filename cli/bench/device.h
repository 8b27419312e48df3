// Tier 0: c10/core headers only.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace ddpkit::bench {

/// Where `--device` ("cpu" or "cuda") puts the rank of this number on its host.
c10::Device device_of_rank(const std::string& device, int local_rank);

/// How many ranks a command measures: `asked`, if any; else two on CPUs, and as many as there are GPUs. Throws
/// InvalidArgument when there are fewer GPUs than ranks.
int ranks_on(const std::string& device, int asked);

}  // namespace ddpkit::bench
