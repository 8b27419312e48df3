#include <ddpkit/error.h>

#include "comm/backend.h"

#ifdef DDPKIT_GLOO
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#define USE_C10D_GLOO  // The header is empty without it.
#include <ATen/ops/div.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <ddpkit/parse_number.h>

#include "comm/backends/shm_rendezvous.h"
#include "comm/sockets.h"
#include "comm/timeout.h"

namespace ddpkit {
namespace {

/// The guard reports the late rank. gloo's timeout must come after the guard's.
constexpr std::chrono::seconds kGlooAfterGuard(2);

/// Returns the descriptors of the stream sockets of this process. [inode] An earlier gloo group may close its sockets
/// meanwhile, so descriptors may be reused.
std::map<ino_t, int> open_sockets() {
  std::map<ino_t, int> sockets;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    int fd = -1, type = 0;
    socklen_t length = sizeof type;
    struct stat status {};
    if (parse_number(entry.path().filename().string(), fd) && ::fstat(fd, &status) == 0 &&
        ::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) == 0 && type == SOCK_STREAM)
      sockets.emplace(status.st_ino, fd);
  }
  return sockets;
}

/// gloo writes to connections that may have ended. gloo's threads inherit this thread's signal mask.
class SigpipeBlocked {
 public:
  SigpipeBlocked() {
    sigset_t pipe;
    ::sigemptyset(&pipe);
    ::sigaddset(&pipe, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &pipe, &before_);
  }
  ~SigpipeBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

bool is_connected(int fd) {
  sockaddr_storage peer{};
  socklen_t length = sizeof peer;
  return ::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) == 0;
}

std::shared_ptr<gloo::transport::Device> device_of_interface(const std::string& interface) {
  try {
    return c10d::ProcessGroupGloo::createDeviceForInterface(interface);
  } catch (const std::exception& error) {
    throw InvalidArgument(fmt::format(
        "GLOO_SOCKET_IFNAME names the network interface \"{}\", which gloo cannot use: {}", interface, error.what()));
  }
}

/// One connection per device: gloo spreads its collectives over them.
std::vector<std::shared_ptr<gloo::transport::Device>> choose_gloo_devices(const LaunchEnvironment& environment) {
  using c10d::ProcessGroupGloo;
  if (const char* names = std::getenv("GLOO_SOCKET_IFNAME"); names && *names) {
    std::vector<std::shared_ptr<gloo::transport::Device>> devices;
    std::istringstream list(names);
    for (std::string interface; std::getline(list, interface, ',');) devices.push_back(device_of_interface(interface));
    return devices;
  }
  // On one host, loopback works for any host name and does not accept connections from other hosts.
  if (environment.local_world_size == environment.world_size)
    return {ProcessGroupGloo::createDeviceForHostname(usable_loopback("127.0.0.1"))};
  const std::string address = address_towards(environment.master_addr);
  return {address.empty() ? ProcessGroupGloo::createDefaultDevice()
                          : ProcessGroupGloo::createDeviceForHostname(address)};
}

/// ProcessGroupGloo divides after the sum, and its reduce() does not divide. For float16, this class divides before the
/// sum, as DistributedDataParallel in Python does: the sum may overflow although the mean does not.
class GlooGroup final : public c10d::ProcessGroupGloo {
 public:
  /// `before`: the sockets that were open before the construction.
  GlooGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
            const c10::intrusive_ptr<Options>& options, const std::map<ino_t, int>& before)
      : ProcessGroupGloo(store, rank, size, options) {
    std::vector<int> sockets;
    for (const auto& [inode, fd] : open_sockets()) {
      if (!before.contains(inode) && is_connected(fd)) sockets.push_back(fd);
    }
    // With another count, some sockets may belong to another thread of this process. They must not be shut down.
    if (sockets.size() == options->devices.size() * static_cast<std::size_t>(size - 1)) {
      for (const int fd : sockets) sockets_.push_back(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    }
  }

  ~GlooGroup() override {
    for (const int fd : sockets_) ::close(fd);
  }

  /// gloo has no abort. A collective fails if one of its connections ends.
  void end_connections() {
    for (const int fd : sockets_) ::shutdown(fd, SHUT_RD);  // SHUT_WR would cause SIGPIPE in gloo.
  }

  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return ProcessGroupGloo::allreduce(tensors, divide_first(tensors, options));
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return ProcessGroupGloo::allreduce_coalesced(tensors, divide_first(tensors, options));
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    if (options.reduceOp.op_ != c10d::ReduceOp::AVG || tensors.size() != 1)
      return ProcessGroupGloo::reduce(tensors, options);
    if (at::isIntegralType(tensors[0].scalar_type(), true))
      throw InvalidArgument("gloo's reduce() has no mean of integers: sum them and divide, or use all_reduce()");
    const at::NoGradGuard no_grad;
    c10d::ReduceOptions sum = options;
    sum.reduceOp = c10d::ReduceOp::SUM;
    if (options.rootRank == getRank()) {
      tensors[0].div_(getSize());
      return ProcessGroupGloo::reduce(tensors, sum);
    }
    Tensors quotients{tensors[0] / getSize()};  // The other ranks keep their values.
    return ProcessGroupGloo::reduce(quotients, sum);
  }

 private:
  template <class Options>
  Options divide_first(Tensors& tensors, Options options) const {
    if (options.reduceOp.op_ != c10d::ReduceOp::AVG || tensors.empty() || tensors[0].scalar_type() != at::kHalf)
      return options;
    const at::NoGradGuard no_grad;
    for (at::Tensor& tensor : tensors) tensor.div_(getSize());
    options.reduceOp = c10d::ReduceOp::SUM;
    return options;
  }

  std::vector<int> sockets_;  ///< Duplicates of gloo's sockets.
};

/// `limit`: for the connections. `name`: this rank's number in messages.
c10::intrusive_ptr<ForwardingBackend> connect_gloo(const c10::intrusive_ptr<c10d::Store>& store,
                                                   const LaunchEnvironment& environment,
                                                   std::chrono::milliseconds timeout, int name,
                                                   std::chrono::milliseconds limit);

class GlooBackend final : public ForwardingBackend {
 public:
  GlooBackend(Ptr<GlooGroup> group, std::unique_ptr<GroupGuard> guard)
      : ForwardingBackend(group, at::kCPU, std::move(guard)), group_(std::move(group)) {
    guard_->start({.abort = [this] { group_->end_connections(); }});
  }
  ~GlooBackend() override {
    guard_->stop();
    if (guard_->failed()) group_->end_connections();
  }

  Ptr<Backend> subgroup(const Ptr<c10d::Store>& store, const std::vector<int>& /*ranks*/,
                        const LaunchEnvironment& part) override {
    return create_gloo_backend(store, part, guard_->timeout());
  }
  void set_elastic(const Ptr<c10d::Store>& store, const LaunchEnvironment& /*environment*/) override {
    start_agreement(connect_engine(store, rank_, size_, guard_->timeout(), /*first_rank=*/0));
  }
  bool scatters_by_all_reduce() const noexcept override { return true; }

 private:
  std::function<bool()> end_of(const WorkPtr& work) override {
    return [weak = c10::weak_intrusive_ptr<c10d::Work>(work)] {
      const WorkPtr owned = weak.lock();
      return !owned || owned->isCompleted();  // gloo's queue owns the work until its end.
    };
  }

  Ptr<ForwardingBackend> reconnect(const Ptr<c10d::Store>& store, const LaunchEnvironment& place, int name,
                                   const std::function<void()>& /*check*/) override {
    return connect_gloo(store, place, guard_->timeout(), name, kReconnectLimit);
  }

  const Ptr<GlooGroup> group_;
};

c10::intrusive_ptr<ForwardingBackend> connect_gloo(const c10::intrusive_ptr<c10d::Store>& store,
                                                   const LaunchEnvironment& environment,
                                                   std::chrono::milliseconds timeout, int name,
                                                   std::chrono::milliseconds limit) {
  auto guard = std::make_unique<GroupGuard>(store, environment, timeout, name);
  const SigpipeBlocked blocked;
  const std::chrono::milliseconds gloo_timeout = clamp_timeout(timeout) + kGlooAfterGuard;
  auto options = c10d::ProcessGroupGloo::Options::create(std::min(gloo_timeout, limit));
  options->devices = choose_gloo_devices(environment);
  options->threads = std::max(options->threads, static_cast<int>(options->devices.size()) * 2);
  const std::map<ino_t, int> before = open_sockets();
  auto group = c10::make_intrusive<GlooGroup>(store, environment.rank, environment.world_size, options, before);
  group->setTimeout(gloo_timeout);
  return c10::make_intrusive<GlooBackend>(std::move(group), std::move(guard));
}

}  // namespace

c10::intrusive_ptr<ForwardingBackend> create_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                          const LaunchEnvironment& environment,
                                                          std::chrono::milliseconds timeout, int name) {
  return connect_gloo(store, environment, timeout, name < 0 ? environment.rank : name,
                      std::chrono::milliseconds::max());
}

}  // namespace ddpkit

#else

namespace ddpkit {

c10::intrusive_ptr<ForwardingBackend> create_gloo_backend(const c10::intrusive_ptr<c10d::Store>&,
                                                          const LaunchEnvironment&, std::chrono::milliseconds, int) {
  throw InvalidArgument(
      "this build of ddpkit has no gloo backend: install gloo's headers (Debian and Ubuntu: libgloo-dev) and configure "
      "with -DDDPKIT_GLOO=ON");
}

}  // namespace ddpkit
#endif
