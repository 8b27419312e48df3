#include <ddpkit/error.h>

#include "comm/backends.h"

#ifdef DDPKIT_GLOO
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#define USE_C10D_GLOO  // The header is empty without it.
#include <ATen/ops/div.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace ddpkit {
namespace {

/// This host's address on the way to the master: the others can reach it there, whatever this host calls itself. Empty
/// when there is no way.
std::string address_towards(const std::string& master) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(master.c_str(), "9", &hints, &found) != 0) return {};
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(found, &::freeaddrinfo);
  std::string address;
  for (const addrinfo* at = found; at && address.empty(); at = at->ai_next) {
    const int fd = ::socket(at->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_storage own{};
    socklen_t length = sizeof own;
    char text[NI_MAXHOST];
    // Connecting a datagram socket sends nothing: it only asks the kernel for the route.
    if (fd >= 0 && ::connect(fd, at->ai_addr, at->ai_addrlen) == 0 &&
        ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0 &&
        ::getnameinfo(reinterpret_cast<sockaddr*>(&own), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0)
      address = text;
    if (fd >= 0) ::close(fd);
  }
  return address;
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
  // On one host loopback serves, whatever the host's name resolves to, and nobody outside can connect.
  if (environment.local_world_size == environment.world_size)
    return {ProcessGroupGloo::createDeviceForHostname(usable_loopback("127.0.0.1"))};
  const std::string address = address_towards(environment.master_addr);
  return {address.empty() ? ProcessGroupGloo::createDefaultDevice()
                          : ProcessGroupGloo::createDeviceForHostname(address)};
}

/// ProcessGroupGloo sums before it divides, and its reduce() does not divide. This class divides float16 first, as
/// DistributedDataParallel in Python does, since the sum of float16 values may overflow where the mean does not.
class GlooBackend : public c10d::ProcessGroupGloo {
 public:
  using c10d::ProcessGroupGloo::ProcessGroupGloo;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

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
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> create_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const LaunchEnvironment& environment,
                                                      std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices = choose_gloo_devices(environment);
  options->threads = std::max(options->threads, static_cast<int>(options->devices.size()) * 2);
  return c10::make_intrusive<GlooBackend>(store, environment.rank, environment.world_size, options);
}

}  // namespace ddpkit

#else

namespace ddpkit {

c10::intrusive_ptr<c10d::Backend> create_gloo_backend(const c10::intrusive_ptr<c10d::Store>&, const LaunchEnvironment&,
                                                      std::chrono::milliseconds) {
  throw InvalidArgument(
      "this build of ddpkit has no gloo backend: install gloo's headers (Debian and Ubuntu: libgloo-dev) and configure "
      "with -DDDPKIT_GLOO=ON");
}

}  // namespace ddpkit
#endif
