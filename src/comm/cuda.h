// Tier 1: ATen/core/Tensor.h. Functions that need CUDA. A build without CUDA has no devices.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

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

/// A CUDA graph of the work that this thread queues on the current stream.
class Graph {
 public:
  virtual ~Graph() = default;
  virtual void begin_capture() = 0;
  virtual void end_capture() = 0;
  virtual void replay() = 0;
};
/// Throws InvalidArgument in a build without CUDA.
std::unique_ptr<Graph> create_graph();

}  // namespace ddpkit::cuda
