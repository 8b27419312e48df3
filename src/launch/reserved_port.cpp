#include "launch/reserved_port.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include <ddpkit/error.h>

namespace ddpkit::launcher {
namespace {

/// Returns a socket bound to any port of the address, or -1 with errno.
template <class Address>
int bind_any_port(Address& address) {
  const int fd = ::socket(reinterpret_cast<const sockaddr&>(address).sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  socklen_t length = sizeof address;
  const int on = 1;
  if (::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
      ::bind(fd, reinterpret_cast<const sockaddr*>(&address), length) == 0 &&
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0)
    return fd;
  const int error = errno;
  ::close(fd);
  errno = error;
  return -1;
}

}  // namespace

ReservedPort::ReservedPort() {
  sockaddr_in ipv4{};
  ipv4.sin_family = AF_INET;
  ipv4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  fd_ = bind_any_port(ipv4);
  number_ = ntohs(ipv4.sin_port);
  if (fd_ < 0 && errno == EADDRNOTAVAIL) {  // Ranks use ::1 if the host's loopback has only IPv6.
    sockaddr_in6 ipv6{};
    ipv6.sin6_family = AF_INET6;
    ipv6.sin6_addr = in6addr_loopback;
    fd_ = bind_any_port(ipv6);
    number_ = ntohs(ipv6.sin6_port);
  }
  if (fd_ < 0) throw Error(fmt::format("no free TCP port on 127.0.0.1 or ::1: {}", std::strerror(errno)));
}

ReservedPort::~ReservedPort() { ::close(fd_); }

}  // namespace ddpkit::launcher
