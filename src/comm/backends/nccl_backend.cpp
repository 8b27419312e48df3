#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <fmt/format.h>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/error.h>

#include "comm/backends.h"

namespace ddpkit {

c10::intrusive_ptr<c10d::Backend> create_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const LaunchEnvironment& environment, c10::Device device,
                                                      std::chrono::milliseconds timeout) {
  if (cuda_device_count() == 0) throw InvalidArgument("the nccl backend needs a GPU, but this host shows none");
  if (!device.is_cuda())
    throw InvalidArgument(fmt::format("the nccl backend needs a CUDA device, not {}", device.str()));
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  options->is_high_priority_stream = true;  // Small kernels of communication must not queue behind backward's.
  auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, environment.rank, environment.world_size, options);
  backend->setBoundDeviceId(device);
  return backend;
}

bool is_nccl_available() noexcept { return true; }

int cuda_device_count() { return c10::cuda::device_count(); }

void set_cuda_device(c10::Device device) { c10::cuda::set_device(device.index()); }

}  // namespace ddpkit
