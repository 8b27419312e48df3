// Tier 1: ATen/core/Tensor.h. Functions that need CUDA. A build without CUDA has no devices.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <vector>

namespace ddpkit::cuda {

/// Returns the number of GPUs that this process can use.
int device_count();
/// Sets the current device of this thread.
void set_device(c10::Device device);

/// Writes the sum of `parts`, one per device of this process, to parts[0], by NCCL. parts[i] is contiguous and used on
/// streams[i]. Returns false, and does nothing, if there is no NCCL or if NCCL does not support the type.
bool reduce(const std::vector<at::Tensor>& parts, const std::vector<c10::Stream>& streams);

/// Returns `query` of an event for the guard's thread: another thread may capture a graph. Throws if the device is
/// lost.
std::function<bool()> reached(std::function<bool()> query);

/// A process group whose collectives a graph contains.
class CapturedGroup {
 public:
  virtual ~CapturedGroup() = default;
  /// Throws the group's failure.
  virtual void check_replay() = 0;
  /// Adds a replay to the calls of the group.
  virtual void watch_replay(std::function<bool()> has_ended) = 0;
};

/// A CUDA graph of the work that this thread queues on the current stream.
class Graph {
 public:
  virtual ~Graph() = default;
  virtual void begin_capture() = 0;
  virtual void end_capture() = 0;
  /// Throws the failure of a captured group, after release().
  virtual void replay() = 0;
  /// Adds a group to a graph that is being captured. Returns false if the graph has it.
  virtual bool add(std::shared_ptr<CapturedGroup> group) = 0;
  /// Destroys the captured work. NCCL waits for this before it ends or aborts a communicator. Thread-safe.
  virtual void release() noexcept = 0;
};
/// Throws InvalidArgument in a build without CUDA.
std::shared_ptr<Graph> create_graph();
/// Returns the graphs of create_graph() that are being captured now, by any thread.
std::vector<std::shared_ptr<Graph>> graphs_in_capture();

}  // namespace ddpkit::cuda
