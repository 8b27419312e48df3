#include "comm/master_address.h"

#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/roll_call.h"

namespace ddpkit {
namespace {

using Clock = std::chrono::steady_clock;

/// How long to retry a host name that does not resolve. A cluster's DNS may be slower than the start of its processes.
constexpr std::chrono::seconds kResolveLimit(5);

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  Socket(Socket&& other) noexcept : fd_(other.release()) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

Addresses resolve(const LaunchEnvironment& environment) {
  const addrinfo hints{.ai_flags = AI_NUMERICSERV,
                       .ai_family = AF_UNSPEC,
                       .ai_socktype = SOCK_STREAM,
                       .ai_protocol = 0,
                       .ai_addrlen = 0,
                       .ai_addr = nullptr,
                       .ai_canonname = nullptr,
                       .ai_next = nullptr};
  const auto deadline = Clock::now() + kResolveLimit;
  for (;;) {
    addrinfo* found = nullptr;
    const int status =
        ::getaddrinfo(environment.master_addr.c_str(), std::to_string(environment.master_port).c_str(), &hints, &found);
    if (status == 0) return {found, &::freeaddrinfo};
    if (Clock::now() > deadline)
      throw RendezvousError(
          fmt::format("{} \"{}\" does not resolve to an address: {}", environment.rank < 0 ? "the host" : "MASTER_ADDR",
                      environment.master_addr, ::gai_strerror(status)),
          {.rank = 0, .call = "rendezvous"});
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
}

bool is_loopback(const sockaddr& address) {
  if (address.sa_family == AF_INET)
    return (ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24) == 127;
  return address.sa_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
}

constexpr const char* kNoLoopback = ": the loopback interface is down or lacks this address; run: ip link set lo up";

bool loopback_is_up() {
  const Socket socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq request{};
  std::strcpy(request.ifr_name, "lo");
  return ::ioctl(socket.get(), SIOCGIFFLAGS, &request) != 0 || (request.ifr_flags & IFF_UP) != 0;
}

/// Returns 0 if a process listens at the address, otherwise the errno.
int connect_error(const addrinfo& at) {
  const Socket socket(::socket(at.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket.get() < 0) return errno;
  if (::connect(socket.get(), at.ai_addr, at.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  pollfd descriptor{socket.get(), POLLOUT, 0};
  int error = ETIMEDOUT;
  socklen_t length = sizeof error;
  if (::poll(&descriptor, 1, 2000) == 1) ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  return error;
}

/// Returns nothing if another process listens there.
std::optional<int> try_to_listen(const LaunchEnvironment& environment, const Addresses& addresses) {
  const addrinfo* loopback = nullptr;
  for (const addrinfo* at = addresses.get(); at; at = at->ai_next) {
    if (is_loopback(*at->ai_addr) && (!loopback || at->ai_family == AF_INET)) loopback = at;
  }
  sockaddr_in6 any{};
  any.sin6_family = AF_INET6;
  any.sin6_addr = in6addr_any;
  any.sin6_port = htons(environment.master_port);
  sockaddr_in any4{};
  any4.sin_family = AF_INET;
  any4.sin_addr.s_addr = htonl(INADDR_ANY);
  any4.sin_port = htons(environment.master_port);

  const auto fail = [&](const char* call, int error) {
    const bool has_no_address = error == EADDRNOTAVAIL || error == ENETUNREACH;
    throw RendezvousError(
        fmt::format("cannot listen on {}, port {}: {}: {}{}", environment.master_addr, environment.master_port, call,
                    std::strerror(error), has_no_address && loopback ? kNoLoopback : ""),
        {.rank = 0, .call = "rendezvous"});
  };
  const sockaddr* address = loopback ? loopback->ai_addr : reinterpret_cast<const sockaddr*>(&any);
  socklen_t length = loopback ? loopback->ai_addrlen : sizeof any;
  Socket socket(::socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (socket.get() < 0 && !loopback && errno == EAFNOSUPPORT) {  // A host without IPv6.
    address = reinterpret_cast<const sockaddr*>(&any4);
    length = sizeof any4;
    socket = Socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  }
  if (socket.get() < 0) fail("socket", errno);
  const int on = 1, off = 0;
  if (::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0) fail("setsockopt", errno);
  if (address->sa_family == AF_INET6 && !loopback &&
      ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) != 0)
    fail("setsockopt", errno);
  const bool is_bound = ::bind(socket.get(), address, length) == 0;
  if (is_bound && ::listen(socket.get(), SOMAXCONN) == 0) return socket.release();
  const int error = errno;
  if (error != EADDRINUSE) fail(is_bound ? "listen" : "bind", error);
  return std::nullopt;
}

bool belongs_to_this_host(const addrinfo& at) {
  const Socket socket(::socket(at.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_storage address{};
  std::memcpy(&address, at.ai_addr, at.ai_addrlen);
  // sockaddr_in6 has its port at the same place.
  reinterpret_cast<sockaddr_in&>(address).sin_port = 0;
  return socket.get() >= 0 && ::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), at.ai_addrlen) == 0;
}

}  // namespace

int listen_as_master(const LaunchEnvironment& environment) {
  if (const auto listener = try_to_listen(environment, resolve(environment))) return *listener;
  throw RendezvousError(fmt::format("MASTER_PORT {} is already taken on this host by another program, or by another "
                                    "process with RANK=0: give each process of a job its own RANK, set MASTER_PORT to "
                                    "a free port, or let `ddpkit run` choose one",
                                    environment.master_port),
                        {.rank = 0, .call = "rendezvous"});
}

std::optional<int> listen_if_first(const LaunchEnvironment& environment) {
  const Addresses addresses = resolve(environment);
  for (const addrinfo* at = addresses.get(); at; at = at->ai_next) {
    if (belongs_to_this_host(*at)) return try_to_listen(environment, addresses);
  }
  return std::nullopt;
}

SocketAddress wait_for_master(const LaunchEnvironment& environment, const std::string& host,
                              std::chrono::milliseconds timeout, const std::function<void()>& check) {
  const Addresses addresses = resolve(environment);
  const std::string who = environment.rank < 0 ? "this launcher" : fmt::format("rank {}", environment.rank);
  const auto start = Clock::now();
  WaitReport report;
  auto nap = std::chrono::milliseconds(2);
  for (;;) {
    check();
    int error = 0;
    bool is_unreachable = true;  // All addresses are unreachable, so waiting does not help.
    for (const addrinfo* at = addresses.get(); at; at = at->ai_next) {
      error = connect_error(*at);
      if (error == 0) {
        SocketAddress address{.length = at->ai_addrlen};
        std::memcpy(&address.bytes, at->ai_addr, at->ai_addrlen);
        return address;
      }
      is_unreachable = is_unreachable && is_loopback(*at->ai_addr) &&
                       (error == ENETUNREACH || error == EADDRNOTAVAIL || !loopback_is_up());
    }
    const std::string place =
        fmt::format("{} at {}:{} ({})", host, environment.master_addr, environment.master_port, std::strerror(error));
    if (is_unreachable)
      throw RendezvousError(fmt::format("{} cannot reach {}{}", who, place, kNoLoopback),
                            {.rank = environment.rank, .call = "rendezvous"});
    const double waited = std::chrono::duration<double>(Clock::now() - start).count();
    if (Clock::now() - start > timeout)
      throw RendezvousError(fmt::format("the rendezvous timed out: {} cannot reach {} within {:.1f} s", who, place,
                                        std::chrono::duration<double>(timeout).count()),
                            {.rank = 0, .call = "rendezvous"});
    report.write_if_late(
        [&] { return fmt::format("{} has waited {:.0f} s for {}{}", who, waited, place, alone_hint(environment)); });
    std::this_thread::sleep_for(nap);
    nap = std::min(nap * 2, std::chrono::milliseconds(100));
  }
}

}  // namespace ddpkit
