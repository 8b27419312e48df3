// The virtual GPUs find the faults that they promise to find (tests/virtual_gpu/README.md).
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#include <torch/torch.h>

#include <sys/wait.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "gpu/gpu.h"

namespace {

using c10::cuda::CUDAStream, c10::cuda::CUDAStreamGuard;

/// The end of a child process that runs `body` on virtual GPUs.
ddpkit::testing::ChildEnd end_of(const std::function<void()>& body, const char* variable = "VGPU_JITTER_US",
                                 const char* value = "0") {
  const auto child = [&](int) {
    ::setenv(variable, value, 1);
    body();
    return 0;
  };
  return ddpkit::testing::run_children(1, child, {.time_limit = std::chrono::seconds(60)}).ends[0];
}

void check_aborts(const std::function<void()>& body, const std::string& text) {
  const auto end = end_of(body);
  INFO(end.output);
  CHECK(WIFSIGNALED(end.status));
  CHECK(WTERMSIG(end.status) == SIGABRT);
  CHECK_THAT(end.output, ContainsSubstring(text));
}

void check_ends_well(const std::function<void()>& body) {
  const auto end = end_of(body);
  INFO(end.output);
  CHECK(end.ok());
}

torch::Tensor ones() { return torch::ones({1000}, torch::kCUDA); }

/// Work on a tensor of the current stream, on another stream. `waits`: whether the stream waits for the current one.
void use_on_another_stream(const torch::Tensor& tensor, const std::function<void(const torch::Tensor&)>& use,
                           bool waits) {
  const CUDAStream side = c10::cuda::getStreamFromPool();
  if (waits) {
    at::cuda::CUDAEvent ready;
    ready.record();
    ready.block(side);
  }
  const CUDAStreamGuard guard(side);
  use(tensor);
}

void read_all(const torch::Tensor& tensor) { static_cast<void>(tensor + 1); }

}  // namespace

TEST_CASE("virtual GPUs end a program in which a stream uses memory without waiting for another stream", "[gpu]") {
  NEEDS_GPU();
  NEEDS_VIRTUAL_GPUS();
  check_aborts([] { use_on_another_stream(ones(), read_all, false); }, "aten::add on stream");
  check_aborts(
      [] {
        use_on_another_stream(
            ones(), [](const auto& t) { t.zero_(); }, false);
      },
      "no event orders the two");
  check_aborts(
      [] {
        const auto tensor = ones();
        use_on_another_stream(tensor, read_all, true);
        tensor.zero_();  // The other stream may not have read the ones.
      },
      "no event orders the two");
  check_ends_well([] {
    const auto tensor = ones();
    use_on_another_stream(tensor, read_all, true);
    c10::cuda::device_synchronize();
    tensor.zero_();
    use_on_another_stream(
        tensor.narrow(0, 0, 500), [](const auto& t) { t.zero_(); }, true);
    tensor.narrow(0, 500, 500).zero_();  // Another part of the memory.
  });
}

TEST_CASE("virtual GPUs end a program that reuses memory while another stream uses it", "[gpu]") {
  NEEDS_GPU();
  NEEDS_VIRTUAL_GPUS();
  check_aborts(
      [] {
        use_on_another_stream(ones(), read_all, true);
        ones();
      },
      "an allocation on stream");
  check_ends_well([] {
    use_on_another_stream(
        ones(),
        [](const torch::Tensor& tensor) {
          read_all(tensor);
          c10::cuda::CUDACachingAllocator::recordStream(tensor.storage().data_ptr(), c10::cuda::getCurrentCUDAStream());
        },
        true);
    ones();
  });
}

TEST_CASE("allocated memory of virtual GPUs is NaN", "[gpu]") {
  NEEDS_GPU();
  NEEDS_VIRTUAL_GPUS();
  check_ends_well([] {
    for (int round = 0; round < 3; ++round) {  // The second allocation reuses the memory of the first one.
      const auto fresh = torch::empty({1000}, torch::kCUDA);
      if (!fresh.isnan().all().item<bool>()) std::exit(1);
      fresh.zero_();
    }
  });
}

TEST_CASE("the host cannot access the memory of virtual GPUs", "[gpu]") {
  NEEDS_GPU();
  NEEDS_VIRTUAL_GPUS();
  const auto end = end_of([] { std::exit(*ones().const_data_ptr<float>() == 1 ? 0 : 1); });
  CHECK(WIFSIGNALED(end.status));
}

TEST_CASE("virtual GPUs refuse what a GPU refuses during a capture", "[gpu]") {
  NEEDS_GPU();
  NEEDS_VIRTUAL_GPUS();
  check_ends_well([] {
    const CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
    cudaEvent_t before = nullptr, inside = nullptr;
    for (cudaEvent_t* event : {&before, &inside}) cudaEventCreate(event);
    const auto stream = c10::cuda::getCurrentCUDAStream();
    cudaEventRecord(before, stream);
    const auto code = [](cudaStreamCaptureMode mode) {
      cudaError_t error = cudaSuccess;
      std::thread([&] {
        cudaEvent_t own = nullptr;
        cudaEventCreate(&own);
        cudaThreadExchangeStreamCaptureMode(&mode);
        error = cudaEventQuery(own);
      }).join();
      return error;
    };
    bool right = true;
    cudaGraph_t graph = nullptr;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    right = right && code(cudaStreamCaptureModeGlobal) == cudaErrorStreamCaptureUnsupported;
    right = right && code(cudaStreamCaptureModeThreadLocal) == cudaSuccess;
    right = right && cudaEventQuery(before) == cudaErrorStreamCaptureUnsupported;
    right = right && cudaStreamWaitEvent(stream, before, 0) == cudaErrorStreamCaptureIsolation;
    cudaEventRecord(inside, stream);
    right = right && cudaStreamWaitEvent(nullptr, inside, 0) == cudaErrorStreamCaptureImplicit;
    right = right && cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeRelaxed) == cudaErrorStreamCaptureUnsupported;
    right = right && cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated;
    right = right && cudaEventQuery(inside) == cudaErrorCapturedEvent;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    right = right && code(cudaStreamCaptureModeGlobal) == cudaSuccess;
    right = right && cudaStreamEndCapture(stream, &graph) == cudaSuccess;
    std::exit(right ? 0 : 1);
  });
}

TEST_CASE("host functions of virtual GPUs can be serial, as those of a GPU may be", "[gpu]") {
  NEEDS_GPU();
  NEEDS_VIRTUAL_GPUS();
  const auto overlap = [] {
    // Each function waits for the other one, with a limit.
    static std::atomic<int> running = 0, overlapped = 0;
    const auto wait = [](void*) {
      ++running;
      for (int i = 0; i < 1000 && running < 2; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (running == 2) ++overlapped;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      --running;
    };
    for (int i = 0; i < 2; ++i) cudaLaunchHostFunc(c10::cuda::getStreamFromPool(), wait, nullptr);
    c10::cuda::device_synchronize();
    std::exit(overlapped == 2 ? 0 : 1);
  };
  CHECK(end_of(overlap).ok());
  CHECK(WEXITSTATUS(end_of(overlap, "VGPU_SERIAL_HOST_FUNC", "1").status) == 1);
}

TEST_CASE("an event, a stream and a host function of virtual GPUs belong to one device", "[gpu]") {
  NEEDS_GPUS(2);
  NEEDS_VIRTUAL_GPUS();
  check_ends_well([] {
    const auto stream = c10::cuda::getStreamFromPool(false, 1);
    cudaEvent_t event = nullptr;
    cudaEventCreate(&event);  // Of device 0.
    const bool right = cudaEventRecord(event, stream) == cudaErrorInvalidResourceHandle &&
                       cudaLaunchHostFunc(
                           stream, [](void*) {}, nullptr) == cudaErrorInvalidResourceHandle;
    std::exit(right ? 0 : 1);
  });
}
