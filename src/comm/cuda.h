// Tier 1: ATen/core/Tensor.h. What needs CUDA. A build without CUDA has no devices.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <memory>
#include <vector>

namespace ddpkit::cuda {

/// GPUs that this process can use.
int device_count();
/// Makes `device` the current one of this thread.
void set_device(c10::Device device);

/// Writes the sum of `parts`, one per device of this process, to parts[0], by NCCL. parts[i] is contiguous and belongs
/// to streams[i], on which its device works. Returns false, and does nothing, if NCCL is missing or has no sum of this
/// type.
bool reduce(const std::vector<at::Tensor>& parts, const std::vector<c10::Stream>& streams);

/// A CUDA graph of the work that this thread gives to the current stream.
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
