#include "device.h"

#include <ATen/Context.h>
#include <torch/cuda.h>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "timing.h"

namespace ddpkit::bench {

c10::Device place_rank(const std::string& device, const LaunchEnvironment& environment, bool pin) {
  if (device != "cpu") return {at::kCUDA, static_cast<c10::DeviceIndex>(environment.local_rank)};
  if (pin) pin_to_core(environment.local_rank, environment.local_world_size);
  return at::kCPU;
}

int ranks_on(const std::string& device, int asked) {
  if (device == "cpu") return asked > 0 ? asked : 2;
  const int gpus = static_cast<int>(torch::cuda::device_count());
  if (!at::hasCUDA()) throw InvalidArgument("--device cuda: this ddpkit is built without CUDA (script/build cuda)");
  if (gpus == 0) throw InvalidArgument("--device cuda: this host shows no GPU");
  if (asked > gpus)
    throw InvalidArgument(fmt::format("--device cuda: {} ranks, but this host has {} GPU{}: each rank needs one", asked,
                                      gpus, gpus == 1 ? "" : "s"));
  return asked > 0 ? asked : gpus;
}

}  // namespace ddpkit::bench
