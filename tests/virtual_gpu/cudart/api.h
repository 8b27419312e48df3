// Shared code of the sources of libcudart.so.13.
#pragma once

#include <cuda_runtime_api.h>

#include "virtual_gpu/vgpu.h"

#define VGPU_API extern "C" __attribute__((visibility("default")))

// Calls that LibTorch needs only for features that virtual GPUs do not have.
#define VGPU_UNSUPPORTED(name, ...) \
  VGPU_API cudaError_t name(__VA_ARGS__) { return vgpu::fail(cudaErrorNotSupported); }

// Returns from a call if the devices are lost.
#define VGPU_RETURN_IF_LOST() \
  if (vgpu::devices_are_lost()) return vgpu::fail(cudaErrorECCUncorrectable)

// Returns from a call that CUDA prohibits while a capture runs, depending on the modes of capture and thread.
#define VGPU_RETURN_IF_CAPTURED() \
  if (vgpu::is_prohibited_by_capture()) return vgpu::fail(cudaErrorStreamCaptureUnsupported)

namespace vgpu {

/// Stores the error for cudaGetLastError() and returns it.
cudaError_t fail(cudaError_t error);

/// Returns whether the running captures prohibit calls that may disturb a capture, such as cudaMalloc(). Invalidates
/// these captures.
bool is_prohibited_by_capture();

/// Replaces LibTorch's CUDA operators if the process has LibTorch's CUDA library.
void replace_operators();

}  // namespace vgpu
