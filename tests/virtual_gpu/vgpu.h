// The interface between the libraries of virtual GPUs. libcudart.so.13 defines it.
#pragma once

#include <cstddef>
#include <functional>

namespace vgpu {

using Task = std::function<void()>;

/// Appends a task to a `cudaStream_t`. While the stream is captured, the task becomes a node of the graph.
void enqueue(void* stream, Task task);

/// Blocks until the stream has run all its tasks. Does nothing while the stream is captured.
void wait_for(void* stream);

bool is_capturing(void* stream);
int current_device();
int device_count();

/// Bytes of memory per device.
std::size_t device_memory();

const char* device_name();

/// An integer environment variable.
long setting(const char* name, long otherwise);

}  // namespace vgpu
