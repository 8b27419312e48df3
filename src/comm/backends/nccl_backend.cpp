#include <ddpkit/comm/process_group.h>
#include <ddpkit/error.h>

#include "comm/backend.h"
#include "comm/cuda.h"

#ifdef DDPKIT_CUDA
#include "comm/shm_rendezvous.h"
#include "comm/timeout.h"

#define USE_C10D_NCCL  // The header is empty without it.
#include <ATen/Context.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace ddpkit {
namespace {

using EndEvent = std::shared_ptr<at::cuda::CUDAEvent>;

/// How long the destructor waits for the collectives of this rank and for the other ranks, and then for NCCL.
constexpr std::chrono::seconds kEndLimit(2);
/// After a failure, running collectives have this time to complete.
constexpr std::chrono::milliseconds kAbortDelay(100);
/// A call that NCCL has not started within this time waits for another rank: only the abort ends it.
constexpr std::chrono::seconds kStartLimit(1);
/// The guard reports the late rank. c10d's timeout ends the process, so it must come after the guard's.
constexpr std::chrono::seconds kWatchdogAfterGuard(60);

/// Time in which the ranks that remain in an elastic group must connect.
constexpr std::chrono::seconds kConnectLimit(30);

/// C++ permits a pointer to a protected member through a derived class.
struct EndOf : c10d::ProcessGroupNCCL::WorkNCCL {
  static EndEvent event(c10d::Work& work) { return dynamic_cast<WorkNCCL&>(work).*(&EndOf::ncclEndEvent_); }
};

/// The same for a communicator. Only for communicators that no other thread uses yet.
struct LastResult : c10d::NCCLComm {
  using Lock = std::unique_lock<std::recursive_mutex>;
  static std::pair<Lock, ncclResult_t&> of(c10d::NCCLComm& communicator) {
    return {Lock(communicator.*(&LastResult::mutex_)), communicator.*(&LastResult::ncclAsyncErr_)};
  }
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

  /// Waits until NCCL has connected the ranks in its nonblocking mode. `check`: may throw.
  void wait_until_connected(const std::function<void()>& check) {
    const auto is_connected = [this] {
      return std::ranges::all_of(devNCCLCommMap_, [this](auto& entry) {
        const auto [lock, result] = LastResult::of(*entry.second);
        result = ncclSuccess;  // c10d asks NCCL only if the last result is a success.
        return checkForNCCLErrors(entry.second) || result != ncclInProgress;
      });
    };
    const bool in_time = poll_until(std::chrono::steady_clock::now() + kConnectLimit, [&] {
      check();
      return is_connected();
    });
    const std::string error = in_time ? find_error() : fmt::format("no connection within {} s", kConnectLimit.count());
    if (!error.empty()) throw RendezvousError("NCCL cannot connect the remaining ranks: " + error);
  }

  /// Removes the running collectives from c10d's watchdog, which would log them as failed.
  void silence_watchdog() {
    const std::lock_guard lock(workMetaListMutex_);
    workMetaList_.clear();
  }
};

class NcclBackend;

/// `name`: this rank's number in messages. `check`: called while the ranks connect; may throw. Without it, a rank that
/// ends meanwhile lets the others wait without a limit.
c10::intrusive_ptr<ForwardingBackend> connect_nccl(const c10::intrusive_ptr<c10d::Store>& store,
                                                   const LaunchEnvironment& environment, c10::Device device,
                                                   std::chrono::milliseconds timeout, int name,
                                                   const std::function<void()>& check = {});

/// Ends the groups that still exist when the program calls std::exit() or returns from main(): before CUDA ends, and
/// before the destructors of static objects.
class OpenGroups {
 public:
  static OpenGroups& all() {
    static auto* groups = new OpenGroups;
    return *groups;
  }
  void add(NcclBackend* group) {
    const std::lock_guard lock(mutex_);
    // CUDA has started, so its own handler runs later.
    if (!std::exchange(is_registered_, true)) std::atexit([] { all().end(); });
    groups_.push_back(group);
  }
  void remove(NcclBackend* group) {
    const std::lock_guard lock(mutex_);
    std::erase(groups_, group);
  }

 private:
  void end();

  std::mutex mutex_;
  std::vector<NcclBackend*> groups_;
  bool is_registered_ = false;
  const pid_t process_ = ::getpid();
};

/// Connects in the constructor, and ends in the destructor. The destructor of ProcessGroupNCCL only aborts: it prints a
/// warning, and another rank that is still in the last collective hangs.
class NcclBackend final : public ForwardingBackend, private cuda::CapturedGroup {
 public:
  NcclBackend(Ptr<NcclGroup> group, at::Device device, std::unique_ptr<GroupGuard> guard,
              const std::function<void()>& check)
      : ForwardingBackend(group, device, std::move(guard), /*hides_aborts=*/true), group_(std::move(group)) {
    group_->setBoundDeviceId(device);
    // allocateTensor() needs LibTorch's allocator, and a communicator to register the memory with.
    at::globalContext().lazyInitDevice(at::kCUDA);
    group_->eagerConnectSingleDevice(device);
    if (check) group_->wait_until_connected(check);
    guard_->start({.abort = [this] { end_collectives(); }, .error = [this] { return find_error(); }});
  }
  ~NcclBackend() override {
    OpenGroups::all().remove(this);
    try {
      if (!end(kEndLimit).empty()) {
        // The other ranks cannot complete these calls.
        if (!guard_->is_idle(std::chrono::milliseconds(0))) guard_->abort("it left the group while its calls ran");
        guard_->stop();
        group_->silence_watchdog();
        group_->abort();  // Does not wait for graphs: a graph with this group's collectives owns the group.
      }
    } catch (const std::exception&) {
      // The device is lost.
    }
    // A lost device cannot free memory. Then the destructor of ProcessGroupNCCL's memory pool would end the process.
    if (cudaFree(nullptr) != cudaSuccess) static_cast<void>(Ptr<NcclGroup>(group_).release());
  }

  std::string end(std::chrono::milliseconds limit) override {
    if (has_ended_) return {};
    if (std::string obstacle = ForwardingBackend::end(limit); !obstacle.empty()) return obstacle;
    has_ended_ = true;
    release_graphs();
    // ProcessGroupNCCL::shutdown() has no timeout. It waits for graphs that the program captured without GraphedStep.
    std::promise<void> done;
    const auto is_done = done.get_future();
    std::thread([group = group_, device = device_, done = std::move(done)]() mutable {
      try {
        const c10::cuda::CUDAGuard on_device(device);
        group->shutdown();
      } catch (const std::exception&) {
        // The device is lost.
      }
      group.reset();  // Otherwise this thread could destroy the group while the process ends.
      done.set_value();
    }).detach();
    static_cast<void>(is_done.wait_for(kEndLimit));
    return {};
  }

  Ptr<Backend> subgroup(const Ptr<c10d::Store>& store, const std::vector<int>& /*ranks*/,
                        const LaunchEnvironment& part) override {
    return create_nccl_backend(store, part, device_, guard_->timeout());
  }
  void set_elastic(const Ptr<c10d::Store>& store, const LaunchEnvironment& /*environment*/) override {
    start_agreement(connect_engine(store, rank_, size_, guard_->timeout(), /*first_rank=*/0));
  }

 private:
  Ptr<ForwardingBackend> reconnect(const Ptr<c10d::Store>& store, const LaunchEnvironment& place, int name,
                                   const std::function<void()>& check) override {
    return connect_nccl(store, place, device_, guard_->timeout(), name, check);
  }
  std::function<bool()> end_of(const WorkPtr& work) override {
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None)
      return cuda::reached([end = EndOf::event(*work)] { return end->query(); });
    if (is_elastic())
      throw InvalidArgument("a CUDA graph cannot contain collectives of a group with InitOptions::elastic");
    const std::shared_ptr<cuda::CapturedGroup> self(static_cast<cuda::CapturedGroup*>(this),
                                                    [owner = Ptr<NcclBackend>::reclaim_copy(this)](auto*) {});
    const std::lock_guard lock(graphs_mutex_);
    for (const auto& graph : cuda::graphs_in_capture()) {
      if (graph->add(self)) graphs_.push_back(graph);
    }
    return {};
  }
  void check_replay() override {
    if (has_ended_) throw Error(kShutDown);
    check();
  }
  void watch_replay(std::function<bool()> has_ended) override {
    const auto [event, index] = begin(EventKind::kGraphReplay, 0);
    guard_->watch(index, event, std::move(has_ended));
  }
  void release_graphs() {
    const std::lock_guard lock(graphs_mutex_);
    for (const auto& each : graphs_) {
      if (const auto graph = each.lock()) graph->release();
    }
    graphs_.clear();
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
      const std::unique_lock lock(starts_, kStartLimit);  // The abort frees the communicator, also during a call of it.
      group_->abort();  // Also waits until the graphs of this group have been released.
    } catch (const std::exception&) {
      // The device is lost.
    }
  }

  const Ptr<NcclGroup> group_;
  std::atomic<bool> has_ended_ = false;
  std::mutex graphs_mutex_;
  std::vector<std::weak_ptr<cuda::Graph>> graphs_;
};

void OpenGroups::end() {
  if (::getpid() != process_) return;  // A child made by fork() has no group.
  std::unique_lock lock(mutex_);
  const std::vector<NcclBackend*> groups(groups_.rbegin(), groups_.rend());
  std::vector<c10::intrusive_ptr<NcclBackend>> owned;
  for (NcclBackend* group : groups) owned.push_back(c10::intrusive_ptr<NcclBackend>::reclaim_copy(group));
  lock.unlock();
  for (auto& group : owned) {
    // If a rank is missing, it waits for this rank: its guard then reports the end of this process.
    static_cast<void>(group->end(kEndLimit));
    static_cast<void>(group.release());  // The destructor must not run after the end of CUDA.
  }
}

/// ProcessGroupNCCL and NCCL read these variables, so this is called before the first group is created.
void set_defaults() {
  constexpr std::pair<const char*, const char*> kDefaults[] = {
      {"TORCH_NCCL_DUMP_ON_TIMEOUT", "0"},       // 1: the ranks poll rank 0's store each second, also after its end.
      {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"},  // Otherwise c10d's watchdog kills the process.
      {"TORCH_NCCL_RETHROW_CUDA_ERRORS", "0"},   // The same, if the device is lost.
      {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "100"},  // Otherwise the watchdog sleeps one minute after a failure.
      {"NCCL_LAUNCH_ORDER_IMPLICIT", "1"},             // Collectives of several groups run in the order of their calls.
      {"TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false"}};  // send() and recv() would print a warning.
  static const bool once = [&] {
    for (const auto& [name, value] : kDefaults) ::setenv(name, value, /*overwrite=*/0);
    return true;
  }();
  static_cast<void>(once);
}

c10::intrusive_ptr<ForwardingBackend> connect_nccl(const c10::intrusive_ptr<c10d::Store>& store,
                                                   const LaunchEnvironment& environment, c10::Device device,
                                                   std::chrono::milliseconds timeout, int name,
                                                   const std::function<void()>& check) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = clamp_timeout(timeout) + kWatchdogAfterGuard;
  options->is_high_priority_stream = true;  // Small communication kernels must not queue behind backward's kernels.
  if (check) options->config.blocking = 0;
  set_defaults();
  auto guard = std::make_unique<GroupGuard>(store, environment, timeout, name);
  auto backend = c10::make_intrusive<NcclBackend>(
      c10::make_intrusive<NcclGroup>(store, environment.rank, environment.world_size, std::move(options)), device,
      std::move(guard), check);
  OpenGroups::all().add(backend.get());
  return backend;
}

}  // namespace

void check_nccl(at::Device device) {
  if (cuda::device_count() == 0) throw InvalidArgument("the nccl backend needs a GPU, but this host has none");
  if (!device.is_cuda())
    throw InvalidArgument(fmt::format("the nccl backend needs a CUDA device, not {}", device.str()));
}

c10::intrusive_ptr<ForwardingBackend> create_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                          const LaunchEnvironment& environment, c10::Device device,
                                                          std::chrono::milliseconds timeout) {
  return connect_nccl(store, environment, device, timeout, environment.rank);
}

bool is_nccl_available() noexcept { return true; }

}  // namespace ddpkit

#else

namespace ddpkit {

void check_nccl(at::Device) {
  throw InvalidArgument(
      "this build of ddpkit has no nccl backend: build the CUDA configuration (cmake --preset cuda, or "
      "-DDDPKIT_CUDA=ON)");
}

c10::intrusive_ptr<ForwardingBackend> create_nccl_backend(const c10::intrusive_ptr<c10d::Store>&,
                                                          const LaunchEnvironment&, c10::Device device,
                                                          std::chrono::milliseconds) {
  check_nccl(device);
  return {};
}

bool is_nccl_available() noexcept { return false; }

}  // namespace ddpkit
#endif
