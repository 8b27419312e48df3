// libnvidia-ml.so.1: names, UUIDs and memory of the virtual GPUs. A process sees only its own use of memory.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "virtual_gpu/vgpu.h"

#define VGPU_NVML extern "C" __attribute__((visibility("default"))) int

namespace {

constexpr int kSuccess = 0, kInvalidArgument = 2, kNotSupported = 3;

struct Memory {
  unsigned long long total, free, used;
};

int index_of(const void* device) { return static_cast<int>(reinterpret_cast<std::uintptr_t>(device)) - 1; }

}  // namespace

VGPU_NVML nvmlInit_v2() { return kSuccess; }

VGPU_NVML nvmlShutdown() { return kSuccess; }

VGPU_NVML nvmlSystemGetDriverVersion(char* text, unsigned size) {
  std::snprintf(text, size, "virtual");
  return kSuccess;
}

// NVML does not read CUDA_VISIBLE_DEVICES.
VGPU_NVML nvmlDeviceGetCount_v2(unsigned* count) {
  *count = static_cast<unsigned>(vgpu::setting("VGPU_COUNT", 4));
  return kSuccess;
}

VGPU_NVML nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  unsigned count = 0;
  nvmlDeviceGetCount_v2(&count);
  if (index >= count) return kInvalidArgument;
  *device = reinterpret_cast<void*>(std::uintptr_t{index} + 1);
  return kSuccess;
}

VGPU_NVML nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) {
  unsigned number = 0;
  if (std::sscanf(bus, "%*x:%x", &number) != 1 || number == 0) return kInvalidArgument;
  return nvmlDeviceGetHandleByIndex_v2(number - 1, device);
}

VGPU_NVML nvmlDeviceGetName(void*, char* text, unsigned size) {
  std::snprintf(text, size, "%s", vgpu::device_name());
  return kSuccess;
}

VGPU_NVML nvmlDeviceGetUUID(void* device, char* text, unsigned size) {
  std::snprintf(text, size, "GPU-76677075-0000-0000-0000-%012x", index_of(device));
  return kSuccess;
}

VGPU_NVML nvmlDeviceGetMemoryInfo(void*, Memory* memory) {
  *memory = {vgpu::device_memory(), vgpu::device_memory(), 0};
  return kSuccess;
}

VGPU_NVML nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) {
  *major = vgpu::compute_capability() / 10;
  *minor = vgpu::compute_capability() % 10;
  return kSuccess;
}

/// All pairs read each other's memory. The status 0 is "OK".
VGPU_NVML nvmlDeviceGetP2PStatus(void*, void*, int, int* status) {
  *status = 0;
  return kSuccess;
}

VGPU_NVML nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return kSuccess;
}

// c10 finds these when it first uses the driver, and calls none of them here.
VGPU_NVML nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return kNotSupported; }

VGPU_NVML nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return kNotSupported; }

VGPU_NVML nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return kSuccess;
}
