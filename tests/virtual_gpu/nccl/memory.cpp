// Memory for NCCL. Memory that is freed while it is registered with a communicator aborts the process.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

#include <cuda_runtime_api.h>

#include "virtual_gpu/nccl/handle.h"

namespace vgpu::nccl {
namespace {

/// Memory that is registered with communicators. [address] -> communicators
struct Registered {
  std::mutex mutex;
  std::multimap<void*, ncclComm_t> memory;
};

Registered& registered() {
  static auto* all = new Registered;
  return *all;
}

}  // namespace

const std::shared_ptr<Communicator>& communicator_of(ncclComm_t handle) {
  if (handle && handle->communicator) return handle->communicator;
  std::fprintf(stderr, "virtual NCCL: a communicator is used after its end\n");
  std::abort();
}

void end_registrations(ncclComm_t handle) {
  const std::lock_guard lock(registered().mutex);
  std::erase_if(registered().memory, [&](const auto& entry) { return entry.second == handle; });
}

}  // namespace vgpu::nccl

VGPU_API ncclResult_t ncclCommRegister(const ncclComm_t handle, void* memory, size_t, void** registration) {
  vgpu::nccl::communicator_of(handle);
  const std::lock_guard lock(vgpu::nccl::registered().mutex);
  vgpu::nccl::registered().memory.emplace(memory, handle);
  *registration = memory;
  return ncclSuccess;
}

VGPU_API ncclResult_t ncclCommDeregister(const ncclComm_t handle, void* memory) {
  vgpu::nccl::communicator_of(handle);
  const std::lock_guard lock(vgpu::nccl::registered().mutex);
  const auto [begin, end] = vgpu::nccl::registered().memory.equal_range(memory);
  const auto found = std::find_if(begin, end, [&](const auto& entry) { return entry.second == handle; });
  if (found == end) return ncclInvalidArgument;
  vgpu::nccl::registered().memory.erase(found);
  return ncclSuccess;
}

VGPU_API ncclResult_t ncclCommWindowRegister(ncclComm_t, void*, size_t, ncclWindow_t* window, int) {
  *window = nullptr;
  return ncclSuccess;
}

VGPU_API ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) { return ncclSuccess; }

VGPU_API ncclResult_t ncclDevCommCreate(ncclComm_t, const void*, void*) { return ncclInvalidUsage; }

VGPU_API ncclResult_t ncclDevCommDestroy(ncclComm_t, const void*) { return ncclInvalidUsage; }

VGPU_API ncclResult_t ncclMemAlloc(void** memory, size_t size) {
  return cudaMalloc(memory, size) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

VGPU_API ncclResult_t ncclMemFree(void* memory) {
  {
    const std::lock_guard lock(vgpu::nccl::registered().mutex);
    if (vgpu::nccl::registered().memory.contains(memory)) {
      std::fprintf(stderr, "virtual NCCL: memory is freed that is registered with a communicator\n");
      std::abort();
    }
  }
  return cudaFree(memory) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
