#include <ddpkit/comm/process_group.h>
#include <ddpkit/error.h>

#include "comm/backends.h"

namespace ddpkit {

c10::intrusive_ptr<c10d::Backend> create_nccl_backend(const c10::intrusive_ptr<c10d::Store>&, const LaunchEnvironment&,
                                                      c10::Device, std::chrono::milliseconds) {
  throw InvalidArgument(
      "this build of ddpkit has no nccl backend: build the CUDA configuration (cmake --preset cuda, or "
      "-DDDPKIT_CUDA=ON)");
}

bool is_nccl_available() noexcept { return false; }

int cuda_device_count() { return 0; }

void set_cuda_device(c10::Device) {}

}  // namespace ddpkit
