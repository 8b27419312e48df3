#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>

#define USE_C10D_GLOO  // The header is empty without it.
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/backends.h"

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

std::shared_ptr<gloo::transport::Device> choose_gloo_device(const LaunchEnvironment& environment) {
  using c10d::ProcessGroupGloo;
  if (const char* interface = std::getenv("GLOO_SOCKET_IFNAME"); interface && *interface)
    return ProcessGroupGloo::createDeviceForInterface(interface);
  // On one host loopback serves, whatever the host's name resolves to, and nobody outside can connect.
  if (environment.local_world_size == environment.world_size)
    return ProcessGroupGloo::createDeviceForHostname("127.0.0.1");
  const std::string address = address_towards(environment.master_addr);
  return address.empty() ? ProcessGroupGloo::createDefaultDevice() : ProcessGroupGloo::createDeviceForHostname(address);
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> create_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const LaunchEnvironment& environment,
                                                      std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices.push_back(choose_gloo_device(environment));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, environment.rank, environment.world_size, options);
}

}  // namespace ddpkit
