#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/backends/staging.h"

#ifdef DDPKIT_CUDA
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <utility>

#include "comm/device_index.h"
#include "tensor/stream_set.h"

namespace ddpkit {
namespace {

class EventMark final : public StagingQueue::Mark {
 public:
  explicit EventMark(const c10::Stream& stream) : device_(stream.device()), event_(stream.device_type()) {
    event_.record(stream);
  }
  void block_current_stream() override { event_.block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_)); }
  bool query() override { return event_.query(); }

 private:
  c10::Device device_;
  c10::Event event_;
};

class DeviceQueue final : public StagingQueue {
 public:
  /// High priority: copies must not queue behind backward's kernels.
  explicit DeviceQueue(at::Device device)
      : device_(device),
        stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true)) {}

  bool owns(const at::Tensor& tensor) const override {
    if (tensor.is_cpu()) return false;
    if (tensor.device() != device_)
      throw InvalidArgument(
          fmt::format("this group's device is {}, the tensor's {}", device_.str(), tensor.device().str()));
    return true;
  }

  void refuse_capture(const char* call) const override {
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None) return;
    throw InvalidArgument(fmt::format(
        "{}: the shm backend copies through the host, which a CUDA graph cannot contain: use the nccl backend", call));
  }

  void wait_for_caller() override {
    stream_waits(stream_, c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }

  at::Tensor host_memory(at::IntArrayRef sizes, at::ScalarType dtype) override {
    return at::empty(sizes, at::TensorOptions(dtype).pinned_memory(true));
  }

  void copy(const at::Tensor& to, const at::Tensor& from) override {
    const at::NoGradGuard no_grad;
    const c10::StreamGuard on_stream(stream_);
    to.copy_(from, /*non_blocking=*/true);
    // If the owner frees the tensor, the allocator does not reuse its memory before this copy has completed.
    (to.is_cpu() ? from : to).record_stream(stream_);
  }

  void call(std::function<void()> work) override {
    const c10::DeviceGuard on_device(device_);
    auto* const kept = new std::function<void()>(std::move(work));
    // The stream continues after the function has returned.
    const cudaError_t status = cudaLaunchHostFunc(
        c10::cuda::CUDAStream(stream_).stream(),
        [](void* data) {
          const std::unique_ptr<std::function<void()>> mine(static_cast<std::function<void()>*>(data));
          (*mine)();
        },
        kept);
    if (status == cudaSuccess) return;
    delete kept;
    throw Error(fmt::format("CUDA could not queue a collective on {}: {}", device_.str(), cudaGetErrorString(status)));
  }

  std::shared_ptr<Mark> mark() override { return std::make_shared<EventMark>(stream_); }

 private:
  at::Device device_;
  c10::Stream stream_;
};

}  // namespace

std::unique_ptr<StagingQueue> create_device_queue(at::Device device) {
  if (!device.is_cuda())
    throw InvalidArgument(
        fmt::format("the shm backend is for tensors of the CPU and of CUDA devices, not on {}", device.str()));
  if (const int devices = c10::cuda::device_count(); device.index() >= devices || devices == 0)
    throw InvalidArgument(fmt::format("the device is {}, but this host has {} GPUs", device.str(), devices));
  return std::make_unique<DeviceQueue>(with_index(device, c10::cuda::current_device()));
}

}  // namespace ddpkit

#else

namespace ddpkit {

std::unique_ptr<StagingQueue> create_device_queue(at::Device device) {
  throw InvalidArgument(
      fmt::format("this build of ddpkit has no collectives for tensors on {}: build the CUDA configuration (cmake "
                  "--preset cuda, or -DDDPKIT_CUDA=ON)",
                  device.str()));
}

}  // namespace ddpkit
#endif
