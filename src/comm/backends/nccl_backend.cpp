#include <ddpkit/comm/process_group.h>
#include <ddpkit/error.h>

#include "comm/backend.h"
#include "comm/cuda.h"

#ifdef DDPKIT_CUDA
#include "comm/roll_call.h"
#include "comm/timeout.h"

#define USE_C10D_NCCL  // The header is empty without it.
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <chrono>
#include <cstdlib>
#include <exception>
#include <functional>
#include <mutex>
#include <utility>

namespace ddpkit {
namespace {

using EndEvent = std::shared_ptr<at::cuda::CUDAEvent>;

/// How long the destructor waits for the collectives of this rank, and then for the other ranks.
constexpr std::chrono::seconds kEndLimit(2);
/// After a failure, running collectives have this time to complete.
constexpr std::chrono::milliseconds kAbortDelay(100);
/// The guard reports the late rank. c10d's timeout ends the process, so it must come after the guard's.
constexpr std::chrono::seconds kWatchdogAfterGuard(60);

/// C++ permits a pointer to a protected member through a derived class.
struct EndOf : c10d::ProcessGroupNCCL::WorkNCCL {
  static EndEvent event(c10d::Work& work) { return dynamic_cast<WorkNCCL&>(work).*(&EndOf::ncclEndEvent_); }
};

/// Gives access to protected members.
class NcclGroup final : public c10d::ProcessGroupNCCL {
 public:
  using ProcessGroupNCCL::ProcessGroupNCCL;

  /// Returns the error of a communicator, or an empty string.
  std::string find_error() {
    const std::unique_lock lock(mutex_, std::try_to_lock);  // Held while a communicator for messages is created.
    if (!lock) return {};
    for (auto& [device, communicator] : devNCCLCommMap_) {
      try {
        if (const std::exception_ptr error = checkForNCCLErrors(communicator)) std::rethrow_exception(error);
      } catch (const c10::Error& error) {
        return error.what_without_backtrace();
      }
    }
    return {};
  }

  /// Removes the running collectives from c10d's watchdog, which would log them as failed.
  void silence_watchdog() {
    const std::lock_guard lock(workMetaListMutex_);
    workMetaList_.clear();
  }
};

/// Connects in the constructor, and shuts down in the destructor. The destructor of ProcessGroupNCCL only aborts: it
/// prints a warning, and another rank that is still in the last collective hangs.
class NcclBackend final : public ForwardingBackend {
 public:
  NcclBackend(Ptr<NcclGroup> group, const Ptr<c10d::Store>& store, at::Device device, std::unique_ptr<GroupGuard> guard)
      : ForwardingBackend(group, device, std::move(guard), /*hides_aborts=*/true),
        group_(std::move(group)),
        store_(store) {
    group_->setBoundDeviceId(device);
    // The communicator must exist before memory is registered with it.
    group_->eagerConnectSingleDevice(device);
    guard_->start({.abort = [this] { end_collectives(); }, .error = [this] { return find_error(); }});
  }
  ~NcclBackend() override {
    guard_->stop();  // Fails if an exception is being thrown.
    try {
      // ProcessGroupNCCL::shutdown() waits for the collectives without a timeout and cannot be aborted.
      if (!guard_->failed() && guard_->is_idle(kEndLimit) && others_are_idle()) {
        group_->shutdown();
      } else {
        group_->silence_watchdog();
        group_->abort();
      }
    } catch (const std::exception&) {
      // The device is lost. ProcessGroupNCCL's destructor aborts.
    }
  }

  Ptr<Backend> subgroup(const Ptr<c10d::Store>& store, const std::vector<int>& /*ranks*/,
                        const LaunchEnvironment& part) override {
    return create_nccl_backend(store, part, device_, guard_->timeout());
  }

 private:
  std::function<bool()> end_of(const WorkPtr& work) const override {
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) return {};
    return [end = EndOf::event(*work)] {
      // Another thread may capture a graph.
      const c10::cuda::CUDAStreamCaptureModeGuard mode{cudaStreamCaptureModeThreadLocal};
      try {
        return end->query();
      } catch (const std::exception&) {
        return true;  // The device is lost. The program's next call for the device fails.
      }
    };
  }

  /// Called on the guard's thread.
  std::string find_error() {
    const std::string error = group_->find_error();
    if (!error.empty()) group_->silence_watchdog();
    return error;
  }

  /// Called on the guard's thread.
  void end_collectives() {
    try {
      guard_->is_idle(kAbortDelay);  // The lost rank may have completed its part.
      group_->silence_watchdog();
      group_->abort();
    } catch (const std::exception&) {
      // The device is lost.
    }
  }

  /// Returns whether all ranks call this function within the limit. Then no rank needs this rank any more.
  bool others_are_idle() {
    if (getSize() == 1) return true;
    try {
      roll_call("nccl idle").wait_for_all("");
      // Rank 0 may serve the store, so it leaves last.
      if (getRank() == 0) {
        roll_call("nccl left").wait_for_all("");
      } else {
        roll_call("nccl left").come("");
      }
      return true;
    } catch (const RendezvousError&) {
      return false;  // A rank is late or has died, or the store has died.
    }
  }

  RollCall roll_call(const std::string& name) { return {store_, name, getRank(), getSize(), kEndLimit}; }

  const Ptr<NcclGroup> group_;
  const Ptr<c10d::Store> store_;
};

/// ProcessGroupNCCL reads these variables, so this is called before the first one is created.
void set_defaults() {
  constexpr std::pair<const char*, const char*> kDefaults[] = {
      {"TORCH_NCCL_DUMP_ON_TIMEOUT", "0"},       // 1: the ranks poll rank 0's store each second, also after its end.
      {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"},  // Otherwise c10d's watchdog kills the process.
      {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "100"}};  // Otherwise the watchdog sleeps one minute after a failure.
  static const bool once = [&] {
    for (const auto& [name, value] : kDefaults) ::setenv(name, value, /*overwrite=*/0);
    return true;
  }();
  static_cast<void>(once);
}

}  // namespace

c10::intrusive_ptr<ForwardingBackend> create_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                          const LaunchEnvironment& environment, c10::Device device,
                                                          std::chrono::milliseconds timeout) {
  if (cuda::device_count() == 0) throw InvalidArgument("the nccl backend needs a GPU, but this host has none");
  if (!device.is_cuda())
    throw InvalidArgument(fmt::format("the nccl backend needs a CUDA device, not {}", device.str()));
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = bounded(timeout) + kWatchdogAfterGuard;
  options->is_high_priority_stream = true;  // Small communication kernels must not queue behind backward's kernels.
  set_defaults();
  auto guard = std::make_unique<GroupGuard>(store, environment, timeout, environment.rank);
  return c10::make_intrusive<NcclBackend>(
      c10::make_intrusive<NcclGroup>(store, environment.rank, environment.world_size, std::move(options)), store,
      device, std::move(guard));
}

bool is_nccl_available() noexcept { return true; }

}  // namespace ddpkit

#else

namespace ddpkit {

c10::intrusive_ptr<ForwardingBackend> create_nccl_backend(const c10::intrusive_ptr<c10d::Store>&,
                                                          const LaunchEnvironment&, c10::Device,
                                                          std::chrono::milliseconds) {
  throw InvalidArgument(
      "this build of ddpkit has no nccl backend: build the CUDA configuration (cmake --preset cuda, or "
      "-DDDPKIT_CUDA=ON)");
}

bool is_nccl_available() noexcept { return false; }

}  // namespace ddpkit
#endif
