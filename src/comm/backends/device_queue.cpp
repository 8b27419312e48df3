#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/backends/staging.h"

#ifdef DDPKIT_CUDA
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "comm/device_index.h"

namespace ddpkit {
namespace {

/// The group's thread may call CUDA while another thread captures a graph.
using CaptureModeGuard = c10::cuda::CUDAStreamCaptureModeGuard;

class EventMark final : public StagingQueue::Mark {
 public:
  explicit EventMark(const c10::Stream& stream) : device_(stream.device()), event_(stream.device_type()) {
    event_.record(stream);
  }
  void block(const c10::Stream& stream) const { event_.block(stream); }
  void block_current_stream() override { block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_)); }
  bool query() override {
    const CaptureModeGuard relaxed(cudaStreamCaptureModeThreadLocal);
    return event_.query();
  }

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

  at::Tensor host_memory(at::IntArrayRef sizes, at::ScalarType dtype) override {
    return at::empty(sizes, at::TensorOptions(dtype).pinned_memory(true));
  }

  std::shared_ptr<Mark> mark_caller() override {
    return std::make_shared<EventMark>(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }

  std::shared_ptr<Mark> copy(const Copies& copies, const Mark* after) override {
    const CaptureModeGuard relaxed(cudaStreamCaptureModeThreadLocal);
    if (after) static_cast<const EventMark&>(*after).block(stream_);
    const at::NoGradGuard no_grad;
    const c10::StreamGuard on_stream(stream_);
    for (const auto& [to, from] : copies) {
      to.copy_(from, /*non_blocking=*/true);
      // If the owner frees an output, the allocator does not reuse its memory before this copy has completed. The
      // group's thread keeps inputs until their copies have completed.
      if (!to.is_cpu()) to.record_stream(stream_);
    }
    return std::make_shared<EventMark>(stream_);
  }

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
