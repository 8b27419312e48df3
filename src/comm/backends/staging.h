// Tier 1: ATen/core/Tensor.h. Asynchronous copies between a device and the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

namespace ddpkit {

/// A queue that copies tensors of a device to the host and back, in order: a stream of the device; in tests a thread.
/// All functions return immediately.
class StagingQueue {
 public:
  /// A position in the queue or in the caller's current stream.
  class Mark {
   public:
    virtual ~Mark() = default;
    /// Later work of the calling thread's current stream follows this position.
    virtual void block_current_stream() = 0;
    virtual bool query() = 0;
  };
  /// The target and the source of each copy. They need not exist after the call.
  using Copies = std::vector<std::pair<at::Tensor, at::Tensor>>;

  virtual ~StagingQueue() = default;
  /// Returns whether tensors like `tensor` must be staged.
  virtual bool owns(const at::Tensor& tensor) const = 0;
  /// Throws InvalidArgument if the caller's current stream is being captured.
  virtual void refuse_capture(const char* /*call*/) const {}
  /// Returns contiguous host memory for asynchronous copies.
  virtual at::Tensor host_memory(at::IntArrayRef sizes, at::ScalarType dtype) = 0;
  /// Marks the end of the earlier work of the calling thread's current stream.
  virtual std::shared_ptr<Mark> mark_caller() = 0;
  /// Copies after the earlier copies and, if given, after a mark of the caller. Returns the mark of its end.
  virtual std::shared_ptr<Mark> copy(const Copies& copies, const Mark* after) = 0;
};

/// Creates a stream of a CUDA device. Throws InvalidArgument in a build without CUDA, and for other devices.
std::unique_ptr<StagingQueue> create_device_queue(at::Device device);

}  // namespace ddpkit
