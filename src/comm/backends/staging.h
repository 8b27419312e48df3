// Tier 1: ATen/core/Tensor.h. How tensors of a device get to the host and back without the host waiting.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace ddpkit {

/// A queue of work that is done in the order in which it is given: a stream of the device; in tests a thread. Whoever
/// gives it work goes on at once.
class StagingQueue {
 public:
  /// A place in the queue.
  class Mark {
   public:
    virtual ~Mark() = default;
    /// What the caller's current stream is given from now on comes after this place.
    virtual void caller_waits() = 0;
    virtual bool reached() = 0;
  };

  virtual ~StagingQueue() = default;
  /// Whether tensors like this one have to be staged.
  virtual bool owns(const at::Tensor& tensor) const = 0;
  /// What the queue is given from now on comes after what the caller's current stream has been given so far.
  virtual void wait_for_caller() = 0;
  /// Contiguous memory of the host that copy() reaches without making anybody wait.
  virtual at::Tensor host_memory(at::IntArrayRef sizes, at::ScalarType dtype) = 0;
  /// The host's tensor has to stay until a mark() after this is reached; the device's need not.
  virtual void copy(const at::Tensor& to, const at::Tensor& from) = 0;
  /// Calls `work` on some thread. It must not throw, use the device, or let go of the last reference to its memory.
  virtual void call(std::function<void()> work) = 0;
  virtual std::shared_ptr<Mark> mark() = 0;
};

/// A stream of a CUDA device. Throws InvalidArgument in a build without CUDA, and for a device of another kind.
std::unique_ptr<StagingQueue> create_device_queue(at::Device device);

}  // namespace ddpkit
