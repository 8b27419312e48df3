// Kernels are identified by name. Only at::cuda::sleep's kernel runs.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "virtual_gpu/cudart/api.h"
#include "virtual_gpu/cudart/stream.h"

namespace vgpu {
namespace {

struct Kernels {
  std::mutex mutex;
  std::unordered_map<const void*, const char*> names;
};

Kernels& kernels() {
  static auto* all = new Kernels;
  return *all;
}

const char* name_of(const void* kernel) {
  const std::lock_guard lock(kernels().mutex);
  const auto found = kernels().names.find(kernel);
  return found == kernels().names.end() ? "without a name" : found->second;
}

cudaError_t refuse(const void* kernel) {
  std::fprintf(stderr, "virtual GPU: kernel %.300s cannot run\n", name_of(kernel));
  if (setting("VGPU_ABORT", 0)) std::abort();
  return fail(cudaErrorNotSupported);
}

/// 2 cycles per nanosecond.
void sleep(std::int64_t cycles) { std::this_thread::sleep_for(std::chrono::nanoseconds(cycles / 2)); }

}  // namespace
}  // namespace vgpu

VGPU_API void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}

VGPU_API void __cudaRegisterFatBinaryEnd(void**) {}

VGPU_API void __cudaUnregisterFatBinary(void**) {}

VGPU_API void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, int, void*, void*, void*,
                                     void*, int*) {
  const std::lock_guard lock(vgpu::kernels().mutex);
  vgpu::kernels().names[kernel] = name;
}

VGPU_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

VGPU_API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

VGPU_API unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }

VGPU_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = *block = dim3{1, 1, 1};
  *shared = 0;
  *static_cast<void**>(stream) = nullptr;
  return cudaSuccess;
}

VGPU_API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t,
                                        cudaStream_t stream) {
  if (!std::strstr(vgpu::name_of(kernel), "spin_kernel")) return vgpu::refuse(kernel);
  vgpu::enqueue(stream, [cycles = *static_cast<std::int64_t*>(arguments[0])] { vgpu::sleep(cycles); });
  return cudaSuccess;
}

VGPU_API cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return vgpu::refuse(kernel);
}

VGPU_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) {
  return vgpu::refuse(kernel);
}

VGPU_API cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return vgpu::refuse(kernel);
}

VGPU_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}

VGPU_API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

VGPU_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) {
  *count = 1;
  return cudaSuccess;
}

VGPU_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t,
                                                                            unsigned) {
  *count = 1;
  return cudaSuccess;
}
