#include <ddpkit/comm/process_group.h>
#include <ddpkit/error.h>

#include "comm/backends.h"
#include "comm/cuda.h"

#ifdef DDPKIT_CUDA
#define USE_C10D_NCCL  // The header is empty without it.
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace ddpkit {

c10::intrusive_ptr<c10d::Backend> create_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const LaunchEnvironment& environment, c10::Device device,
                                                      std::chrono::milliseconds timeout) {
  if (cuda::device_count() == 0) throw InvalidArgument("the nccl backend needs a GPU, but this host has none");
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

}  // namespace ddpkit

#else

namespace ddpkit {

c10::intrusive_ptr<c10d::Backend> create_nccl_backend(const c10::intrusive_ptr<c10d::Store>&, const LaunchEnvironment&,
                                                      c10::Device, std::chrono::milliseconds) {
  throw InvalidArgument(
      "this build of ddpkit has no nccl backend: build the CUDA configuration (cmake --preset cuda, or "
      "-DDDPKIT_CUDA=ON)");
}

bool is_nccl_available() noexcept { return false; }

}  // namespace ddpkit
#endif
