#include "comm/cuda.h"

#include <ddpkit/error.h>

#ifdef DDPKIT_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/cuda/nccl.h>

namespace ddpkit::cuda {
namespace {

class CapturedGraph final : public Graph {
 public:
  // Other threads (autograd, NCCL's watchdog) may make unsafe calls during the capture; only this thread must not.
  void begin_capture() override { graph_.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal); }
  void end_capture() override { graph_.capture_end(); }
  void replay() override { graph_.replay(); }

 private:
  at::cuda::CUDAGraph graph_;
};

}  // namespace

int device_count() { return c10::cuda::device_count(); }
void set_device(c10::Device device) { c10::cuda::set_device(device.index()); }

bool reduce(const std::vector<at::Tensor>& parts, const std::vector<c10::Stream>& streams) {
  const auto type = parts[0].scalar_type();
  if (type != at::kFloat && type != at::kDouble && type != at::kHalf && type != at::kBFloat16) return false;
  torch::cuda::nccl::stream_list nccl_streams;
  for (const c10::Stream& stream : streams) nccl_streams.emplace_back(at::cuda::CUDAStream(stream));
  at::Tensor sum = parts[0];
  // LibTorch keeps one communicator per device. This thread calls all of them, as one group.
  torch::cuda::nccl::reduce(parts, sum, /*root=*/0, static_cast<int>(torch::cuda::nccl::ncclRedOp::Sum), nccl_streams);
  return true;
}

std::unique_ptr<Graph> create_graph() { return std::make_unique<CapturedGraph>(); }

}  // namespace ddpkit::cuda

#else

namespace ddpkit::cuda {

int device_count() { return 0; }
void set_device(c10::Device) {}
bool reduce(const std::vector<at::Tensor>&, const std::vector<c10::Stream>&) { return false; }
std::unique_ptr<Graph> create_graph() {
  throw InvalidArgument(
      "this build of ddpkit has no CUDA graphs: build the CUDA configuration (cmake --preset cuda, or "
      "-DDDPKIT_CUDA=ON)");
}

}  // namespace ddpkit::cuda
#endif
