// Shared code of the sources of libcudart.so.13.
#pragma once

#include <cuda_runtime_api.h>

#define VGPU_API extern "C" __attribute__((visibility("default")))

// Calls that LibTorch needs only for features that virtual GPUs do not have.
#define VGPU_UNSUPPORTED(name, ...) \
  VGPU_API cudaError_t name(__VA_ARGS__) { return vgpu::fail(cudaErrorNotSupported); }

namespace vgpu {

/// Stores the error for cudaGetLastError() and returns it.
cudaError_t fail(cudaError_t error);

/// Replaces LibTorch's CUDA operators if the process has LibTorch's CUDA library.
void replace_operators();

}  // namespace vgpu
