// Device memory is host memory at another address: the host cannot access a device's address. Copies run on a stream.
#include "virtual_gpu/cudart/memory.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "virtual_gpu/cudart/api.h"
#include "virtual_gpu/cudart/order.h"
#include "virtual_gpu/cudart/stream.h"

namespace vgpu {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kSpace = std::size_t{1} << 40;  ///< Of all allocations of the process together.
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

std::size_t in_pages(std::size_t size) { return (size + kPage - 1) / kPage * kPage; }

/// The addresses of the devices, followed by as many addresses of the host. Without access until memory is allocated.
char* space() {
  static auto* const begin =
      static_cast<char*>(::mmap(nullptr, 2 * kSpace, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (begin == MAP_FAILED) std::abort();
  return begin;
}

/// Returns an address of the device. No later allocation has the same address, and a page without access follows.
void* allocate(std::size_t size) {
  static std::atomic<std::size_t> used = 0;
  const std::size_t at = used.fetch_add(in_pages(size) + kPage);
  if (at + in_pages(size) > kSpace) return nullptr;
  char* const device = space() + at;
  if (::mprotect(host_address(device), in_pages(size), PROT_READ | PROT_WRITE) != 0) return nullptr;
  return device;
}

void release(void* pointer) {
  const auto block = remove_block(pointer);
  if (!block) return;
  forget_accesses(pointer, block->size);
  ::mmap(host_address(pointer), in_pages(block->size), PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

Task set_bytes(void* memory, int value, std::size_t bytes) {
  return [=] { std::memset(host_address(memory), value, bytes); };
}

Task copy_bytes(void* to, const void* from, std::size_t bytes) {
  return [=] { std::memmove(host_address(to), host_address(from), bytes); };
}

}  // namespace

bool is_device_address(const void* address) {
  return static_cast<std::size_t>(static_cast<const char*>(address) - space()) < kSpace;
}

void* host_address(const void* address) {
  auto* const bytes = static_cast<char*>(const_cast<void*>(address));
  return is_device_address(address) ? bytes + kSpace : bytes;
}

void poison(int device, void* stream, void* memory, std::size_t bytes) {
  const int before = current_device();
  set_current_device(device);
  if (!is_capturing(stream)) {
    check_task(*find_stream(stream), "an allocation", {{memory, bytes, true}}, /*is_allocation=*/true);
    enqueue(stream, set_bytes(memory, 0xff, bytes));
  }
  set_current_device(before);
}

}  // namespace vgpu

VGPU_API cudaError_t cudaMalloc(void** pointer, size_t size) {
  VGPU_RETURN_IF_LOST();
  VGPU_RETURN_IF_CAPTURED();
  if (!vgpu::reserve(size)) return vgpu::fail(cudaErrorMemoryAllocation);
  *pointer = vgpu::allocate(size);
  if (!*pointer) return vgpu::fail(cudaErrorMemoryAllocation);
  std::memset(vgpu::host_address(*pointer), 0xff, size);  // NaN: reads of uninitialized memory become visible.
  vgpu::add_block(*pointer, size, cudaMemoryTypeDevice);
  return cudaSuccess;
}

VGPU_API cudaError_t cudaFree(void* pointer) {
  VGPU_RETURN_IF_LOST();
  if (!pointer) return cudaSuccess;
  VGPU_RETURN_IF_CAPTURED();
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
  VGPU_RETURN_IF_LOST();
  VGPU_RETURN_IF_CAPTURED();
  *pointer = std::aligned_alloc(vgpu::kPage, vgpu::in_pages(size));
  std::memset(*pointer, 0xff, size);
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
  VGPU_RETURN_IF_LOST();
  if (size == 0) return cudaSuccess;
  vgpu::check_order(stream, "cudaMemcpyAsync", {{from, size, false}, {to, size, true}});
  if (vgpu::find_block(from)) {
    vgpu::enqueue(stream, vgpu::copy_bytes(to, from, size));
  } else {
    // CUDA stages pageable memory before the call returns.
    const auto* bytes = static_cast<const char*>(from);
    vgpu::enqueue(stream, [=, staged = std::vector<char>(bytes, bytes + size)] {
      std::memcpy(vgpu::host_address(to), staged.data(), size);
    });
  }
  if (!vgpu::find_block(to)) vgpu::synchronize(stream);
  return cudaSuccess;
}

VGPU_API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  const cudaError_t error = cudaMemcpyAsync(to, from, size, kind, nullptr);
  vgpu::synchronize(nullptr);
  return error;
}

VGPU_API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  VGPU_RETURN_IF_LOST();
  vgpu::check_order(stream, "cudaMemcpyPeerAsync", {{from, size, false}, {to, size, true}});
  vgpu::enqueue(stream, vgpu::copy_bytes(to, from, size));
  return cudaSuccess;
}

VGPU_API cudaError_t cudaMemsetAsync(void* pointer, int value, size_t size, cudaStream_t stream) {
  VGPU_RETURN_IF_LOST();
  vgpu::check_order(stream, "cudaMemsetAsync", {{pointer, size, true}});
  vgpu::enqueue(stream, vgpu::set_bytes(pointer, value, size));
  return cudaSuccess;
}

VGPU_API cudaError_t cudaMemset(void* pointer, int value, size_t size) {
  const cudaError_t error = cudaMemsetAsync(pointer, value, size, nullptr);
  vgpu::synchronize(nullptr);
  return error;
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
