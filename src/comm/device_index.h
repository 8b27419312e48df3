// Tier 0: c10. Devices of a rank.
#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <string_view>

#include <ddpkit/comm/environment.h>

namespace ddpkit {

/// Returns `device`, with `index` if it is a CUDA device without an index, such as at::kCUDA.
inline c10::Device with_index(c10::Device device, int index) {
  if (device.is_cuda() && !device.has_index()) device.set_index(static_cast<c10::DeviceIndex>(index));
  return device;
}

/// Returns the device of this rank's model. A CUDA device without an index becomes GPU number local_rank. `gpus`:
/// number of GPUs that this process can use. Throws InvalidArgument if the host has more ranks than GPUs.
c10::Device device_of_rank(std::optional<c10::Device> wanted, std::string_view backend,
                           const LaunchEnvironment& environment, int gpus);

}  // namespace ddpkit
