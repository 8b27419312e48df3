// libcuda.so.1: the calls of the CUDA driver that LibTorch finds by name. Most report CUDA_ERROR_NOT_SUPPORTED.
#include <cuda.h>

#include <cstdint>
#include <cstdlib>

#undef cuLinkAddData
#undef cuLinkCreate
// The name is only an assembler label: cuda.h declares these functions with parameters that are not used here.
#define VGPU_ALIAS(name, symbol) \
  CUresult name() asm(symbol);   \
  CUresult name() { return CUDA_ERROR_NOT_SUPPORTED; }

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  const char* const multicast = std::getenv("VGPU_MULTICAST");
  *value = attribute == CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED && (!multicast || std::atoi(multicast) != 0);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(static_cast<std::uintptr_t>(device) + 1);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(std::uintptr_t{1});
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }

CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the virtual GPU";
  return CUDA_SUCCESS;
}

VGPU_ALIAS(vgpu_func_get_attribute, "cuFuncGetAttribute")
VGPU_ALIAS(vgpu_func_set_attribute, "cuFuncSetAttribute")
VGPU_ALIAS(vgpu_func_set_cache_config, "cuFuncSetCacheConfig")
VGPU_ALIAS(vgpu_launch_cooperative_kernel, "cuLaunchCooperativeKernel")
VGPU_ALIAS(vgpu_launch_kernel, "cuLaunchKernel")
VGPU_ALIAS(vgpu_link_add_data, "cuLinkAddData_v2")
VGPU_ALIAS(vgpu_link_complete, "cuLinkComplete")
VGPU_ALIAS(vgpu_link_create, "cuLinkCreate_v2")
VGPU_ALIAS(vgpu_module_get_function, "cuModuleGetFunction")
VGPU_ALIAS(vgpu_module_load, "cuModuleLoad")
VGPU_ALIAS(vgpu_module_load_data, "cuModuleLoadData")
VGPU_ALIAS(vgpu_module_load_data_ex, "cuModuleLoadDataEx")
VGPU_ALIAS(vgpu_module_unload, "cuModuleUnload")
VGPU_ALIAS(vgpu_occupancy, "cuOccupancyMaxActiveBlocksPerMultiprocessor")
VGPU_ALIAS(vgpu_pointer_get_attribute, "cuPointerGetAttribute")
VGPU_ALIAS(vgpu_tensor_map_encode_tiled, "cuTensorMapEncodeTiled")

}  // extern "C"
