#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/backends/staging.h"

namespace ddpkit {

std::unique_ptr<StagingQueue> create_device_queue(at::Device device) {
  throw InvalidArgument(
      fmt::format("this build of ddpkit has no collectives for tensors on {}: build the CUDA configuration (cmake "
                  "--preset cuda, or -DDDPKIT_CUDA=ON)",
                  device.str()));
}

}  // namespace ddpkit
