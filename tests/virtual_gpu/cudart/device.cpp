// Devices, errors, and the driver's entry points.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "virtual_gpu/cudart/api.h"
#include "virtual_gpu/cudart/stream.h"

#undef cudaGetDeviceProperties

namespace vgpu {
namespace {

constexpr int kCudaVersion = 13000;
thread_local cudaError_t last_error = cudaSuccess;

bool is_device(int device) { return device >= 0 && device < device_count(); }

const std::map<cudaDeviceAttr, int>& attributes() {
  static const auto* values =
      new std::map<cudaDeviceAttr, int>{{cudaDevAttrComputeCapabilityMajor, compute_capability() / 10},
                                        {cudaDevAttrComputeCapabilityMinor, compute_capability() % 10},
                                        {cudaDevAttrMultiProcessorCount, 4},
                                        {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
                                        {cudaDevAttrMaxThreadsPerBlock, 1024},
                                        {cudaDevAttrWarpSize, 32},
                                        {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448}};
  return *values;
}

void describe(cudaDeviceProp& properties, int device) {
  properties = {};
  std::snprintf(properties.name, sizeof properties.name, "%s", device_name());
  // Equal to the UUID that libnvidia-ml.so.1 prints.
  std::memcpy(properties.uuid.bytes, "vgpu", 4);
  properties.uuid.bytes[15] = static_cast<char>(device);
  properties.totalGlobalMem = device_memory();
  properties.major = compute_capability() / 10;
  properties.minor = compute_capability() % 10;
  properties.warpSize = 32;
  properties.multiProcessorCount = 4;
  properties.maxThreadsPerBlock = 1024;
  properties.maxThreadsPerMultiProcessor = 2048;
  properties.maxThreadsDim[0] = properties.maxThreadsDim[1] = 1024;
  properties.maxThreadsDim[2] = 64;
  properties.maxGridSize[0] = 2147483647;
  properties.maxGridSize[1] = properties.maxGridSize[2] = 65535;
  properties.sharedMemPerBlock = 49152;
  properties.sharedMemPerBlockOptin = 232448;
  properties.sharedMemPerMultiprocessor = 233472;
  properties.regsPerBlock = properties.regsPerMultiprocessor = 65536;
  properties.l2CacheSize = 1 << 20;
  properties.unifiedAddressing = properties.concurrentKernels = 1;
  properties.asyncEngineCount = 2;
  properties.pciBusID = device + 1;
}

cudaError_t no_driver_function() { return cudaErrorNotSupported; }

}  // namespace

cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

void replace_operators() {
  static auto* mutex = new std::recursive_mutex;  // The library's initialization calls this again.
  static bool replaced = false;
  const std::lock_guard lock(*mutex);
  if (replaced || !::dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD)) return;
  replaced = true;
  if (!::dlopen("libvgpu_aten.so", RTLD_NOW | RTLD_GLOBAL)) std::fprintf(stderr, "virtual GPU: %s\n", ::dlerror());
}

}  // namespace vgpu

VGPU_API cudaError_t cudaGetDeviceCount(int* count) {
  vgpu::replace_operators();
  *count = vgpu::device_count();
  return *count ? cudaSuccess : vgpu::fail(cudaErrorNoDevice);
}

VGPU_API cudaError_t cudaGetDevice(int* device) {
  *device = vgpu::current_device();
  return cudaSuccess;
}

VGPU_API cudaError_t cudaSetDevice(int device) {
  if (!vgpu::is_device(device)) return vgpu::fail(cudaErrorInvalidDevice);
  vgpu::set_current_device(device);
  return cudaSuccess;
}

VGPU_API cudaError_t cudaDeviceSynchronize() {
  VGPU_RETURN_IF_LOST();
  vgpu::wait_for_device();
  return cudaSuccess;
}

VGPU_API cudaError_t cudaDriverGetVersion(int* version) {
  *version = vgpu::kCudaVersion;
  return cudaSuccess;
}

VGPU_API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = vgpu::kCudaVersion;
  return cudaSuccess;
}

VGPU_API cudaError_t cudaGetLastError() {
  VGPU_RETURN_IF_LOST();
  return std::exchange(vgpu::last_error, cudaSuccess);
}

VGPU_API cudaError_t cudaPeekAtLastError() {
  VGPU_RETURN_IF_LOST();
  return vgpu::last_error;
}

VGPU_API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorECCUncorrectable:
      return "uncorrectable ECC error encountered";
    case cudaErrorNotSupported:
      return "operation not supported";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    default:
      return "an error of the virtual GPU";
  }
}

VGPU_API const char* cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaError"; }

VGPU_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (!vgpu::is_device(device)) return vgpu::fail(cudaErrorInvalidDevice);
  vgpu::describe(*properties, device);
  return cudaSuccess;
}

VGPU_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (!vgpu::is_device(device)) return vgpu::fail(cudaErrorInvalidDevice);
  const auto found = vgpu::attributes().find(attribute);
  *value = found == vgpu::attributes().end() ? 0 : found->second;
  return cudaSuccess;
}

VGPU_API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  std::snprintf(text, static_cast<std::size_t>(size), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

VGPU_API cudaError_t cudaDeviceCanAccessPeer(int* can_access, int device, int peer) {
  *can_access = device != peer;
  return cudaSuccess;
}

VGPU_API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

VGPU_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

VGPU_API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                      cudaDriverEntryPointQueryResult* result) {
  static void* driver = ::dlopen("libcuda.so.1", RTLD_LAZY);
  void* found = driver ? ::dlsym(driver, name) : nullptr;
  *function = found ? found : reinterpret_cast<void*>(&vgpu::no_driver_function);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

VGPU_API cudaError_t cudaProfilerStart() { return cudaSuccess; }

VGPU_API cudaError_t cudaProfilerStop() { return cudaSuccess; }
