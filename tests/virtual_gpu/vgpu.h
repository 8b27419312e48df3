// The interface between the libraries of virtual GPUs. libcudart.so.13 defines it.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace vgpu {

using Task = std::function<void()>;

/// Appends a task to a `cudaStream_t`. While the stream is captured, the task becomes a node of the graph.
void enqueue(void* stream, Task task);

/// Memory that a task reads or writes. `begin` is an address of a device; other addresses are not checked.
struct Access {
  const void* begin;
  std::size_t bytes;
  bool writes;
};

/// Call before the task `what` is appended to the stream. Aborts the process if an earlier task of another stream uses
/// the same memory, one of the two writes it, and neither an event nor the host orders the two.
void check_order(void* stream, const std::string& what, const std::vector<Access>& accesses);

/// Blocks until the stream has run all its tasks. Does nothing while the stream is captured.
void wait_for(void* stream);

/// As wait_for(), for a call in which the host waits on a GPU too: later tasks of all streams follow.
void synchronize(void* stream);

/// Returns the address at which the host can access the memory of a device. Returns other addresses unchanged.
void* host_address(const void* address);

/// The program has allocated this memory for a stream of the device: sets all bits, on the stream. Floats become NaN.
void poison(int device, void* stream, void* memory, std::size_t bytes);

bool is_capturing(void* stream);

/// All GPUs of this process fail from now on: queued tasks do not run, and calls return an error.
void lose_devices();
bool devices_are_lost();

int current_device();
int device_count();

/// Bytes of memory per device.
std::size_t device_memory();

const char* device_name();

/// 90 for compute capability 9.0.
int compute_capability();

/// An integer environment variable.
long setting(const char* name, long otherwise);

}  // namespace vgpu
