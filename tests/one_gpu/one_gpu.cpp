// Shows one GPU as several: ONE_GPU_AS=4 LD_PRELOAD=libone_gpu.so PROGRAM. All of them are device 0 of CUDA. Ranks of
// different processes then exchange through NCCL, which refuses two ranks on one GPU of a host: so each process that
// uses a GPU other than 0 has its own NCCL_HOSTID, and NCCL connects the ranks as if they were on several hosts, by
// sockets. Within a process, NCCL refuses two of these GPUs.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdlib>
#include <string>
#include <string_view>

namespace {

thread_local int current = 0;

int count() {
  static const char* const text = std::getenv("ONE_GPU_AS");
  static const int value = text ? std::atoi(text) : 4;
  return value;
}

bool is_no_device(int device) { return device < 0 || device >= count(); }

void* libc_dlsym(void* handle, const char* name) {
  using Lookup = void*(void*, const char*);
  static auto* lookup = reinterpret_cast<Lookup*>(::dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34"));
  if (!lookup) lookup = reinterpret_cast<Lookup*>(::dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5"));
  return lookup(handle, name);
}

template <class Function>
Function* driver(const char* name) {
  return reinterpret_cast<Function*>(libc_dlsym(::dlopen("libcuda.so.1", RTLD_NOW), name));
}

int get_context_state(int, unsigned* flags, int* active) {
  static auto* const real = driver<int(int, unsigned*, int*)>("cuDevicePrimaryCtxGetState");
  return real(0, flags, active);
}
int get_device(int* device, int) {
  static auto* const real = driver<int(int*, int)>("cuDeviceGet");
  return real(device, 0);
}
int get_attribute(int* value, int attribute, int) {
  static auto* const real = driver<int(int*, int, int)>("cuDeviceGetAttribute");
  return real(value, attribute, 0);
}

/// Returns this library's function for a function of the driver, or null.
void* replacement(std::string_view name) {
  if (name == "cuDevicePrimaryCtxGetState") return reinterpret_cast<void*>(get_context_state);
  if (name == "cuDeviceGet") return reinterpret_cast<void*>(get_device);
  if (name == "cuDeviceGetAttribute") return reinterpret_cast<void*>(get_attribute);
  return nullptr;
}

}  // namespace

#define REAL(name) static auto* const real = reinterpret_cast<decltype(name)*>(libc_dlsym(RTLD_NEXT, #name))

extern "C" {

// LibTorch finds functions of the driver by dlsym() or cudaGetDriverEntryPointByVersion().
void* dlsym(void* handle, const char* name) noexcept {
  if (void* ours = replacement(name)) return ours;
  return libc_dlsym(handle, name);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                             unsigned long long flags, cudaDriverEntryPointQueryResult* result) {
  REAL(cudaGetDriverEntryPointByVersion);
  const cudaError_t status = real(name, function, version, flags, result);
  if (void* ours = replacement(name); status == cudaSuccess && ours) *function = ours;
  return status;
}

cudaError_t cudaGetDeviceCount(int* devices) {
  REAL(cudaGetDeviceCount);
  const cudaError_t status = real(devices);
  if (status == cudaSuccess && *devices > 0) *devices = count();
  return status;
}

cudaError_t cudaSetDevice(int device) {
  REAL(cudaSetDevice);
  if (is_no_device(device)) return cudaErrorInvalidDevice;
  current = device;
  if (device > 0) ::setenv("NCCL_HOSTID", ("gpu-" + std::to_string(device)).c_str(), 1);
  return real(0);
}

cudaError_t cudaGetDevice(int* device) {
  REAL(cudaGetDevice);
  const cudaError_t status = real(device);
  if (status == cudaSuccess) *device = current;
  return status;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  REAL(cudaGetDeviceProperties);
  return is_no_device(device) ? cudaErrorInvalidDevice : real(properties, 0);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  REAL(cudaDeviceGetAttribute);
  return is_no_device(device) ? cudaErrorInvalidDevice : real(value, attribute, 0);
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return is_no_device(device) || is_no_device(peer) ? cudaErrorInvalidDevice : cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  REAL(cudaDeviceGetDefaultMemPool);
  return real(pool, 0);
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, std::size_t) { return cudaSuccess; }

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int) {
  REAL(cudaDeviceGetPCIBusId);
  return real(id, length, 0);
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes, cudaStream_t stream) {
  REAL(cudaMemcpyPeerAsync);
  return real(to, 0, from, 0, bytes, stream);
}

}  // extern "C"
