#include <ddpkit/comm/process_group.h>
#include <ddpkit/error.h>

#include "comm/backends.h"
#include "comm/cuda.h"

#ifdef DDPKIT_CUDA
#define USE_C10D_NCCL  // The header is empty without it.
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <chrono>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>

namespace ddpkit {
namespace {

using Clock = std::chrono::steady_clock;
using EndEvent = std::shared_ptr<at::cuda::CUDAEvent>;

/// How long the end of a group waits for its collectives, and then for the other ranks.
constexpr std::chrono::seconds kEndLimit(2);

/// C++ permits a pointer to a protected member through a derived class.
struct EndOf : c10d::ProcessGroupNCCL::WorkNCCL {
  static EndEvent event(WorkNCCL& work) { return work.*(&EndOf::ncclEndEvent_); }
};

/// Connects when it is made, and ends in order. The destructor of ProcessGroupNCCL only aborts: it prints a warning,
/// and another rank that is still in the last collective hangs.
class NcclBackend final : public c10d::ProcessGroupNCCL {
 public:
  NcclBackend(const c10::intrusive_ptr<c10d::Store>& store, const LaunchEnvironment& environment, c10::Device device,
              c10::intrusive_ptr<Options> options)
      : ProcessGroupNCCL(store, environment.rank, environment.world_size, std::move(options)), store_(store) {
    setBoundDeviceId(device);
    // Before memory is registered with the communicator: it must exist by then.
    eagerConnectSingleDevice(device);
  }

  ~NcclBackend() override {
    const bool fails = std::uncaught_exceptions() > exceptions_;
    try {
      // shutdown() waits for the collectives without a limit, and nothing can abort it.
      if (!fails && is_idle() && others_are_idle()) {
        shutdown();
      } else {
        abort();
      }
    } catch (const std::exception&) {
      // The device is lost. ProcessGroupNCCL's destructor aborts.
    }
  }

 protected:
  c10::intrusive_ptr<WorkNCCL> initWork(at::Device& device, int rank, c10d::OpType type, bool is_p2p, const char* title,
                                        const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs,
                                        bool record) override {
    auto work = ProcessGroupNCCL::initWork(device, rank, type, is_p2p, title, inputs, outputs, record);
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None) {
      const std::lock_guard lock(mutex_);
      if (ends_.size() >= kMostEnds) forget_reached();
      ends_.push_back(EndOf::event(*work));
    }
    return work;
  }

 private:
  static constexpr std::size_t kMostEnds = 64;

  void forget_reached() {
    std::erase_if(ends_, [](const EndEvent& end) { return end->query(); });
  }

  /// Whether the device finishes this rank's collectives within the limit.
  bool is_idle() {
    const auto deadline = Clock::now() + kEndLimit;
    for (;;) {
      forget_reached();
      if (ends_.empty()) return true;
      if (Clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  /// Whether all ranks come here within the limit. Then no rank needs this one any more.
  bool others_are_idle() {
    if (getSize() == 1) return true;
    try {
      meet("nccl idle");
      // Rank 0 may serve the store: it leaves last.
      if (getRank() == 0) {
        meet("nccl left");
      } else {
        count("nccl left");
      }
      return true;
    } catch (const c10::Error&) {
      return false;  // A rank is late or has died, or the store has.
    }
  }

  void count(const std::string& key) {
    if (store_->add(key, 1) == getSize()) store_->set(key + " all", std::vector<std::uint8_t>{1});
  }
  void meet(const std::string& key) {
    count(key);
    store_->wait({key + " all"}, kEndLimit);
  }

  c10::intrusive_ptr<c10d::Store> store_;
  const int exceptions_ = std::uncaught_exceptions();
  std::mutex mutex_;
  std::vector<EndEvent> ends_;  ///< Of the latest collectives.
};

/// Set before the first ProcessGroupNCCL, which reads it.
void set_defaults() {
  // Else the ranks ask rank 0's store every second, and print warnings after it has ended.
  static const int once = ::setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", /*overwrite=*/0);
  static_cast<void>(once);
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> create_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const LaunchEnvironment& environment, c10::Device device,
                                                      std::chrono::milliseconds timeout) {
  if (cuda::device_count() == 0) throw InvalidArgument("the nccl backend needs a GPU, but this host has none");
  if (!device.is_cuda())
    throw InvalidArgument(fmt::format("the nccl backend needs a CUDA device, not {}", device.str()));
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  options->is_high_priority_stream = true;  // Small kernels of communication must not queue behind backward's.
  set_defaults();
  return c10::make_intrusive<NcclBackend>(store, environment, device, std::move(options));
}

bool is_nccl_available() noexcept { return true; }

}  // namespace ddpkit

#else

namespace ddpkit {

c10::intrusive_ptr<c10d::Backend> create_nccl_backend(const c10::intrusive_ptr<c10d::Store>&, const LaunchEnvironment&,
                                                      c10::Device, std::chrono::milliseconds) {
  throw InvalidArgument(
      "this build of ddpkit has no nccl backend: build the CUDA configuration (cmake --preset cuda, or "
      "-DDDPKIT_CUDA=ON)");
}

bool is_nccl_available() noexcept { return false; }

}  // namespace ddpkit
#endif
