// Choice of backend and device, and the rendezvous.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iterator>
#include <optional>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/error.h>

#include "comm/backend.h"
#include "comm/backends/hierarchical_backend.h"
#include "comm/backends/shm_backend.h"
#include "comm/backends/staged_backend.h"
#include "comm/cuda.h"
#include "comm/device_index.h"
#include "comm/joining.h"
#include "comm/roll_call.h"
#include "comm/sockets.h"
#include "comm/timeout.h"
#include "comm/trace/event_ring.h"

namespace ddpkit {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using BackendPtr = c10::intrusive_ptr<Backend>;

/// A backend and its name.
struct BackendKind {
  std::string_view name;
  std::optional<at::DeviceType> elastic_device;  ///< The ranks' device in groups with InitOptions::elastic.
  /// Throws InvalidArgument for a device that the backend does not support.
  void (*check)(at::Device device);
  BackendPtr (*create)(const StorePtr& store, const LaunchEnvironment& environment, at::Device device,
                       std::chrono::milliseconds timeout);
};

constexpr BackendKind kBackends[] = {
    {"shm", at::kCPU, [](at::Device) {},
     [](const StorePtr& store, const LaunchEnvironment& environment, at::Device device,
        std::chrono::milliseconds timeout) {
       if (device.is_cpu()) return create_shm_part(store, environment.rank, environment.world_size, timeout);
       return create_staged_shm_backend(store, environment.rank, environment.world_size, device, timeout);
     }},
    {"gloo", at::kCPU, [](at::Device) {},
     [](const StorePtr& store, const LaunchEnvironment& environment, at::Device, std::chrono::milliseconds timeout) {
       return BackendPtr(create_gloo_backend(store, environment, timeout));
     }},
    {"nccl", at::kCUDA, check_nccl,
     [](const StorePtr& store, const LaunchEnvironment& environment, at::Device device,
        std::chrono::milliseconds timeout) {
       return BackendPtr(create_nccl_backend(store, environment, device, timeout));
     }},
    {"hierarchical", std::nullopt,
     [](at::Device device) {
       if (!device.is_cpu())
         throw InvalidArgument(
             fmt::format("the hierarchical backend supports only the CPU, not {}; use nccl", device.str()));
     },
     [](const StorePtr& store, const LaunchEnvironment& environment, at::Device, std::chrono::milliseconds timeout) {
       return create_hierarchical_backend(store, environment, timeout);
     }},
};

const BackendKind& backend_named(std::string_view name, const char* source) {
  const auto* found = std::ranges::find(kBackends, name, &BackendKind::name);
  if (found != std::end(kBackends)) return *found;
  std::vector<std::string_view> names;
  for (const BackendKind& kind : kBackends) names.push_back(kind.name);
  throw InvalidArgument(fmt::format("{} \"{}\" is not one of {}", source, name, fmt::join(names, ", ")));
}

const BackendKind& choose_backend(const InitOptions& options, const LaunchEnvironment& environment) {
  std::string backend = options.backend;
  const char* from_environment = std::getenv("DDPKIT_BACKEND");
  const bool named_here = !backend.empty();
  if (!named_here && from_environment) backend = from_environment;
  if (backend.empty()) {
    const bool gpu = options.device ? options.device->is_cuda() : cuda::device_count() > 0;
    const bool one_host = environment.local_world_size == environment.world_size;
    backend = gpu ? "nccl" : one_host ? "shm" : "gloo";
  }
  return backend_named(backend, named_here ? "the backend" : "DDPKIT_BACKEND");
}

/// See InitOptions::elastic.
void check_elastic(const BackendKind& kind, at::Device device, const LaunchEnvironment& environment) {
  if (kind.elastic_device != device.type())
    throw InvalidArgument(
        fmt::format("InitOptions::elastic: a {} group cannot continue without a lost rank; use shm or gloo with CPU "
                    "ranks, or nccl, on one host",
                    kind.name));
  if (environment.local_world_size != environment.world_size)
    throw InvalidArgument(
        fmt::format("InitOptions::elastic: a {} group continues without a lost rank only on one host, but {} of {} "
                    "ranks are on this host",
                    kind.name, environment.local_world_size, environment.world_size));
}

/// Returns a group of this rank alone, which waits to join the others.
ProcessGroup begin_joining(const InitOptions& options, const BackendKind& kind, at::Device device,
                           const LaunchEnvironment& environment, std::chrono::milliseconds timeout) {
  if (!options.elastic)
    throw InvalidArgument(
        fmt::format("rank {} replaces a lost rank: that needs InitOptions::elastic", environment.rank));
  auto store = connect_store(environment, timeout);
  note_rendezvous(environment);
  LaunchEnvironment alone = environment;
  alone.rank = alone.local_rank = 0;
  alone.world_size = alone.local_world_size = 1;
  const auto own_store = c10::make_intrusive<c10d::HashStore>();
  auto backend = kind.create(own_store, alone, device, timeout);
  backend->set_elastic(own_store, alone);
  ProcessGroup group(std::move(backend), std::move(store), device, alone);
  Joining::begin(group, environment.rank);
  return group;
}

}  // namespace

c10::intrusive_ptr<Backend> create_backend(std::string_view name, const c10::intrusive_ptr<c10d::Store>& store,
                                           const LaunchEnvironment& environment, at::Device device,
                                           std::chrono::milliseconds timeout) {
  return backend_named(name, "the backend").create(store, environment, device, timeout);
}

c10::Device device_of_rank(std::optional<c10::Device> wanted, std::string_view backend,
                           const LaunchEnvironment& environment, int gpus) {
  const c10::Device device = wanted.value_or(c10::Device(backend == "nccl" ? c10::kCUDA : c10::kCPU));
  if (!device.is_cuda() || device.has_index()) return device;
  if (gpus > 0 && environment.local_rank >= gpus)
    throw InvalidArgument(fmt::format(
        "rank {} is number {} on this host, which has {} GPU{}: start at most one rank per GPU, or train on the "
        "CPU with the shm backend",
        environment.rank, environment.local_rank, gpus, gpus == 1 ? "" : "s"));
  return with_index(device, environment.local_rank);
}

ProcessGroup init_process_group(const InitOptions& options) {
  LaunchEnvironment environment = options.environment ? *options.environment : read_launch_environment();
  environment.master_addr = usable_loopback(environment.master_addr);
  const BackendKind& backend_kind = choose_backend(options, environment);
  const at::Device device = device_of_rank(options.device, backend_kind.name, environment, cuda::device_count());
  if (options.timeout.count() <= 0)
    throw InvalidArgument(fmt::format("the timeout is {} ms, but must be positive", options.timeout.count()));
  const std::chrono::milliseconds timeout = clamp_timeout(options.timeout);
  // Before the ranks connect: a rank that ends its connections is a lost rank for the others.
  backend_kind.check(device);
  if (options.elastic) check_elastic(backend_kind, device, environment);
  if (device.is_cuda() && cuda::device_count() > 0) cuda::set_device(device);
  if (environment.replaces) return begin_joining(options, backend_kind, device, environment, timeout);
  EventRing& ring = EventRing::of_process();
  ring.start_rendezvous(environment.world_size);
  const auto start = std::chrono::steady_clock::now();
  try {
    auto store = connect_store(environment, timeout);
    if (environment.world_size > 1) wait_for_ranks(store, environment, timeout);
    auto backend = backend_kind.create(store, environment, device, timeout);
    if (options.elastic) backend->set_elastic(store, environment);
    note_rendezvous(environment);
    ring.set_phase(RankPhase::kTraining);
    return ProcessGroup(std::move(backend), std::move(store), device, environment);
  } catch (const Error& error) {
    const bool late = std::chrono::steady_clock::now() - start >= timeout;
    ring.fail(late ? FailureKind::kTimeout : FailureKind::kPeerLost, error.context().rank);
    throw;
  }
}

}  // namespace ddpkit
