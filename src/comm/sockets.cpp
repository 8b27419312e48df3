#include "comm/sockets.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>

namespace ddpkit {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

AddressList addresses_of(const std::string& host, const std::string& port, int type, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = type;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) found = nullptr;
  if (!found) errno = EADDRNOTAVAIL;
  return {found, &::freeaddrinfo};
}

int close_failed(int fd) {
  const int error = errno;
  if (fd >= 0) ::close(fd);
  errno = error;
  return -1;
}

}  // namespace

std::string address_towards(const std::string& master) {
  const AddressList addresses = addresses_of(master, "9", SOCK_DGRAM, 0);
  std::string address;
  for (const addrinfo* at = addresses.get(); at && address.empty(); at = at->ai_next) {
    const int fd = ::socket(at->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_storage own{};
    socklen_t length = sizeof own;
    char text[NI_MAXHOST];
    // Connecting a datagram socket sends nothing; it makes the kernel select the route.
    if (fd >= 0 && ::connect(fd, at->ai_addr, at->ai_addrlen) == 0 &&
        ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0 &&
        ::getnameinfo(reinterpret_cast<sockaddr*>(&own), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0)
      address = text;
    if (fd >= 0) ::close(fd);
  }
  return address;
}

std::optional<std::uint16_t> listen_on(const std::string& address, int& fd) {
  const AddressList addresses = addresses_of(address, "0", SOCK_STREAM, AI_NUMERICHOST);
  if (!addresses) return std::nullopt;
  sockaddr_storage own{};
  socklen_t length = sizeof own;
  fd = ::socket(addresses->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0 || ::bind(fd, addresses->ai_addr, addresses->ai_addrlen) != 0 || ::listen(fd, SOMAXCONN) != 0 ||
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) != 0) {
    fd = close_failed(fd);
    return std::nullopt;
  }
  return ntohs(own.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(own).sin6_port
                                         : reinterpret_cast<const sockaddr_in&>(own).sin_port);
}

std::string usable_loopback(const std::string& address) {
  const auto can_listen = [](const char* on) {
    int fd = -1;
    const bool listens = listen_on(on, fd).has_value();
    if (listens) ::close(fd);
    return listens;
  };
  const bool has_only_ipv6 =
      address == "127.0.0.1" && !can_listen("127.0.0.1") && errno == EADDRNOTAVAIL && can_listen("::1");
  return has_only_ipv6 ? "::1" : address;
}

int connect_to(const std::string& address, const std::string& port, std::chrono::milliseconds timeout) {
  const AddressList addresses = addresses_of(address, port, SOCK_STREAM, AI_NUMERICHOST | AI_NUMERICSERV);
  if (!addresses) return -1;
  const int fd = ::socket(addresses->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  // The timeout of connect().
  const timeval limit{.tv_sec = std::clamp<std::chrono::seconds::rep>(timeout.count() / 1000, 1, 3600), .tv_usec = 0};
  if (fd < 0 || ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) != 0 ||
      ::connect(fd, addresses->ai_addr, addresses->ai_addrlen) != 0)
    return close_failed(fd);
  return fd;
}

}  // namespace ddpkit
