#include "comm/device_reduce.h"

#include <torch/csrc/cuda/nccl.h>

namespace ddpkit {

bool reduce_over_devices(const std::vector<at::Tensor>& parts, const std::vector<c10::Stream>& streams) {
  const auto type = parts[0].scalar_type();
  if (type != at::kFloat && type != at::kDouble && type != at::kHalf && type != at::kBFloat16) return false;
  torch::cuda::nccl::stream_list nccl_streams;
  for (const c10::Stream& stream : streams) nccl_streams.emplace_back(at::cuda::CUDAStream(stream));
  at::Tensor sum = parts[0];
  // One communicator a device, kept by LibTorch; all of them are called by this thread, as one group.
  torch::cuda::nccl::reduce(parts, sum, /*root=*/0, static_cast<int>(torch::cuda::nccl::ncclRedOp::Sum), nccl_streams);
  return true;
}

}  // namespace ddpkit
