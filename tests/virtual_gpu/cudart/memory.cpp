// Device memory is host memory. Copies run on a stream.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "virtual_gpu/cudart/api.h"
#include "virtual_gpu/cudart/stream.h"

namespace vgpu {
namespace {

constexpr std::size_t kDeviceAlignment = 512, kHostAlignment = 4096;
constexpr int kMaxDevices = 64;

struct Block {
  std::size_t size;
  int device;
  cudaMemoryType type;
};

struct Memory {
  std::mutex mutex;
  std::map<std::uintptr_t, Block> blocks;
  std::size_t used[kMaxDevices] = {};
};

Memory& memory() {
  static auto* all = new Memory;
  return *all;
}

std::uintptr_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

std::optional<Block> find_block(const void* pointer) {
  const std::lock_guard lock(memory().mutex);
  auto next = memory().blocks.upper_bound(address(pointer));
  if (next == memory().blocks.begin()) return std::nullopt;
  --next;
  if (address(pointer) >= next->first + next->second.size) return std::nullopt;
  return next->second;
}

void add_block(const void* pointer, std::size_t size, cudaMemoryType type) {
  const std::lock_guard lock(memory().mutex);
  memory().blocks[address(pointer)] = {size, current_device(), type};
}

std::optional<Block> remove_block(const void* pointer) {
  const std::lock_guard lock(memory().mutex);
  const auto found = memory().blocks.find(address(pointer));
  if (found == memory().blocks.end()) return std::nullopt;
  const Block block = found->second;
  if (block.type == cudaMemoryTypeDevice) memory().used[block.device] -= block.size;
  memory().blocks.erase(found);
  return block;
}

/// Returns false if the device has less free memory.
bool reserve(std::size_t size) {
  const std::lock_guard lock(memory().mutex);
  std::size_t& used = memory().used[current_device()];
  if (used + size > device_memory()) return false;
  used += size;
  return true;
}

void* aligned(std::size_t alignment, std::size_t size) {
  return std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

void release(void* pointer) {
  const auto block = remove_block(pointer);
  if (!block) return;
  std::memset(pointer, 0xff, block->size);
  std::free(pointer);
}

}  // namespace
}  // namespace vgpu

VGPU_API cudaError_t cudaMalloc(void** pointer, size_t size) {
  if (!vgpu::reserve(size)) return vgpu::fail(cudaErrorMemoryAllocation);
  *pointer = vgpu::aligned(vgpu::kDeviceAlignment, size);
  std::memset(*pointer, 0xff, size);  // NaN: reads of uninitialized memory become visible.
  vgpu::add_block(*pointer, size, cudaMemoryTypeDevice);
  return cudaSuccess;
}

VGPU_API cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  const auto block = vgpu::find_block(pointer);
  if (!block) return vgpu::fail(cudaErrorInvalidValue);
  const int device = vgpu::current_device();
  vgpu::set_current_device(block->device);
  vgpu::wait_for_device();
  vgpu::set_current_device(device);
  vgpu::release(pointer);
  return cudaSuccess;
}

VGPU_API cudaError_t cudaMallocAsync(void** pointer, size_t size, cudaStream_t) { return cudaMalloc(pointer, size); }

VGPU_API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  vgpu::enqueue(stream, [pointer] { vgpu::release(pointer); });
  return cudaSuccess;
}

VGPU_API cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  *pointer = vgpu::aligned(vgpu::kHostAlignment, size);
  vgpu::add_block(*pointer, size, cudaMemoryTypeHost);
  return cudaSuccess;
}

VGPU_API cudaError_t cudaFreeHost(void* pointer) {
  if (pointer && !vgpu::remove_block(pointer)) return vgpu::fail(cudaErrorInvalidValue);
  std::free(pointer);
  return cudaSuccess;
}

VGPU_API cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  vgpu::add_block(pointer, size, cudaMemoryTypeHost);
  return cudaSuccess;
}

VGPU_API cudaError_t cudaHostUnregister(void* pointer) {
  return vgpu::remove_block(pointer) ? cudaSuccess : vgpu::fail(cudaErrorHostMemoryNotRegistered);
}

VGPU_API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const std::lock_guard lock(vgpu::memory().mutex);
  *total = vgpu::device_memory();
  *free = *total - vgpu::memory().used[vgpu::current_device()];
  return cudaSuccess;
}

VGPU_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = {};
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = cudaInvalidDeviceId;
  if (const auto block = vgpu::find_block(pointer)) {
    attributes->type = block->type;
    attributes->device = block->device;
    attributes->devicePointer = const_cast<void*>(pointer);
    if (block->type == cudaMemoryTypeHost) attributes->hostPointer = const_cast<void*>(pointer);
  }
  return cudaSuccess;
}

VGPU_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  if (vgpu::find_block(from)) {
    vgpu::enqueue(stream, [=] { std::memmove(to, from, size); });
  } else {
    // CUDA stages pageable memory before the call returns.
    const auto* bytes = static_cast<const char*>(from);
    vgpu::enqueue(stream,
                  [=, staged = std::vector<char>(bytes, bytes + size)] { std::memcpy(to, staged.data(), size); });
  }
  if (!vgpu::find_block(to)) vgpu::wait_for(stream);
  return cudaSuccess;
}

VGPU_API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  const cudaError_t error = cudaMemcpyAsync(to, from, size, kind, nullptr);
  vgpu::wait_for(nullptr);
  return error;
}

VGPU_API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  vgpu::enqueue(stream, [=] { std::memmove(to, from, size); });
  return cudaSuccess;
}

VGPU_API cudaError_t cudaMemsetAsync(void* pointer, int value, size_t size, cudaStream_t stream) {
  vgpu::enqueue(stream, [=] { std::memset(pointer, value, size); });
  return cudaSuccess;
}

VGPU_API cudaError_t cudaMemset(void* pointer, int value, size_t size) {
  cudaMemsetAsync(pointer, value, size, nullptr);
  vgpu::wait_for(nullptr);
  return cudaSuccess;
}

// A device has one pool, which keeps no memory.
VGPU_API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  *pool = reinterpret_cast<cudaMemPool_t>(static_cast<std::uintptr_t>(device) + 1);
  return cudaSuccess;
}

VGPU_API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

VGPU_API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }

VGPU_API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }

VGPU_API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr, void* value) {
  const std::lock_guard lock(vgpu::memory().mutex);
  *static_cast<std::uint64_t*>(value) = vgpu::memory().used[reinterpret_cast<std::uintptr_t>(pool) - 1];
  return cudaSuccess;
}

VGPU_UNSUPPORTED(cudaMemcpyToSymbol, const void*, const void*, size_t, size_t, cudaMemcpyKind)
VGPU_UNSUPPORTED(cudaGetSymbolAddress, void**, const void*)
VGPU_UNSUPPORTED(cudaIpcGetMemHandle, cudaIpcMemHandle_t*, void*)
VGPU_UNSUPPORTED(cudaIpcOpenMemHandle, void**, cudaIpcMemHandle_t, unsigned)
VGPU_UNSUPPORTED(cudaIpcCloseMemHandle, void*)
