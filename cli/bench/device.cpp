#include "device.h"

#include <ATen/Context.h>
#include <torch/cuda.h>

#include <fmt/format.h>

#include <ddpkit/comm/error.h>

namespace ddpkit::bench {

c10::Device device_of_rank(const std::string& device, int local_rank) {
  if (device == "cpu") return at::kCPU;
  return {at::kCUDA, static_cast<c10::DeviceIndex>(local_rank)};
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
