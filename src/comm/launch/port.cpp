#include "port.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include <ddpkit/comm/error.h>

namespace ddpkit::launch {

ReservedPort::ReservedPort() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  const int on = 1;
  const bool bound = fd_ >= 0 && ::setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
                     ::bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 &&
                     ::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  if (bound) {
    number_ = ntohs(address.sin_port);
    return;
  }
  const int error = errno;
  if (fd_ >= 0) ::close(fd_);
  throw Error(fmt::format("no free TCP port on 127.0.0.1: {}", std::strerror(error)));
}

ReservedPort::~ReservedPort() { ::close(fd_); }

}  // namespace ddpkit::launch
