// Tier 1: ATen/core/Tensor.h. Asynchronous copies between a device and the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace ddpkit {

/// A queue that runs work in order: a stream of the device; in tests a thread. All functions return immediately.
class StagingQueue {
 public:
  /// A position in the queue.
  class Mark {
   public:
    virtual ~Mark() = default;
    /// Later work of the caller's current stream follows this position.
    virtual void block_current_stream() = 0;
    virtual bool query() = 0;
  };

  virtual ~StagingQueue() = default;
  /// Returns whether tensors like `tensor` must be staged.
  virtual bool owns(const at::Tensor& tensor) const = 0;
  /// Throws InvalidArgument if the caller's current stream is being captured.
  virtual void refuse_capture(const char* /*call*/) const {}
  /// Later work of the queue follows the earlier work of the caller's current stream.
  virtual void wait_for_caller() = 0;
  /// Returns contiguous host memory for asynchronous copies.
  virtual at::Tensor host_memory(at::IntArrayRef sizes, at::ScalarType dtype) = 0;
  /// The host tensor must exist until a later mark() is reached. The device tensor need not.
  virtual void copy(const at::Tensor& to, const at::Tensor& from) = 0;
  /// Calls `work` on another thread. It must not throw, use the device, or release the last reference to device memory.
  virtual void call(std::function<void()> work) = 0;
  virtual std::shared_ptr<Mark> mark() = 0;
};

/// Creates a stream of a CUDA device. Throws InvalidArgument in a build without CUDA, and for other devices.
std::unique_ptr<StagingQueue> create_device_queue(at::Device device);

}  // namespace ddpkit
