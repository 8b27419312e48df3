#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <ddpkit/comm/error.h>

#include "comm/backends.h"

namespace ddpkit {
namespace {

using Clock = std::chrono::steady_clock;

/// How long a name that does not resolve may take to appear (a cluster's DNS may lag behind its processes).
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
      throw RendezvousError(fmt::format("MASTER_ADDR \"{}\" does not resolve to an address: {}",
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

/// The socket that rank 0's store listens on: loopback alone where the master's address is loopback, so that nobody
/// outside this host can reach it.
int listen_as_master(const LaunchEnvironment& environment) {
  const Addresses addresses = resolve(environment);
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

  const sockaddr* address = loopback ? loopback->ai_addr : reinterpret_cast<const sockaddr*>(&any);
  socklen_t length = loopback ? loopback->ai_addrlen : sizeof any;
  Socket socket(::socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (socket.get() < 0 && !loopback) {  // A host without IPv6.
    address = reinterpret_cast<const sockaddr*>(&any4);
    length = sizeof any4;
    socket = Socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  }
  const int on = 1, off = 0;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address->sa_family == AF_INET6 && !loopback)
    ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  if (::bind(socket.get(), address, length) != 0 || ::listen(socket.get(), SOMAXCONN) != 0) {
    const int error = errno;
    if (error == EADDRINUSE)
      throw RendezvousError(fmt::format("MASTER_PORT {} is already taken on this host by another program: set "
                                        "MASTER_PORT to a free port, or let `ddpkit run` choose one",
                                        environment.master_port),
                            {.rank = 0, .call = "rendezvous"});
    throw RendezvousError(fmt::format("cannot listen on port {}: {}", environment.master_port, std::strerror(error)),
                          {.rank = 0, .call = "rendezvous"});
  }
  return socket.release();
}

/// Returns when somebody listens at the master's address. c10d's own client would sleep a second between tries.
void wait_for_master(const LaunchEnvironment& environment, std::chrono::milliseconds timeout) {
  const Addresses addresses = resolve(environment);
  const auto deadline = Clock::now() + timeout;
  auto nap = std::chrono::milliseconds(2);
  for (;;) {
    int error = 0;
    for (const addrinfo* at = addresses.get(); at; at = at->ai_next) {
      const Socket socket(::socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      if (socket.get() < 0) continue;
      if (::connect(socket.get(), at->ai_addr, at->ai_addrlen) == 0) return;
      error = errno;
      if (error != EINPROGRESS) continue;
      pollfd descriptor{socket.get(), POLLOUT, 0};
      error = ETIMEDOUT;
      if (::poll(&descriptor, 1, 2000) == 1) {
        socklen_t length = sizeof error;
        ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
        if (error == 0) return;
      }
    }
    if (Clock::now() > deadline)
      throw RendezvousError(fmt::format("rank {} cannot reach rank 0 at {}:{} ({}) within {:.1f} s", environment.rank,
                                        environment.master_addr, environment.master_port, std::strerror(error),
                                        std::chrono::duration<double>(timeout).count()),
                            {.rank = 0, .call = "rendezvous"});
    std::this_thread::sleep_for(nap);
    nap = std::min(nap * 2, std::chrono::milliseconds(100));
  }
}

/// What this process knows of earlier rendezvous.
class Meetings {
 public:
  static Meetings& all() {
    static auto* meetings = new Meetings;
    return *meetings;
  }

  int count(const LaunchEnvironment& environment) {
    const std::lock_guard lock(mutex_);
    return counts_[job_of(environment)];
  }
  void add(const LaunchEnvironment& environment) {
    const std::lock_guard lock(mutex_);
    ++counts_[job_of(environment)];
  }

  /// Served until this process ends: of two rendezvous one after the other, a rank that comes early to the second must
  /// not find the first one's store, which would end under it.
  void serve(const LaunchEnvironment& environment, c10::intrusive_ptr<c10d::TCPStore> store) {
    const std::lock_guard lock(mutex_);
    // Registered when a store has been made: so it ends before whatever LibTorch made for it does.
    if (served_.empty()) std::atexit([] { all().end_served(); });
    served_.insert_or_assign(address_of(environment), std::move(store));
  }
  bool serves(const LaunchEnvironment& environment) {
    const std::lock_guard lock(mutex_);
    return served_.count(address_of(environment)) != 0;
  }

 private:
  void end_served() {
    // A child made by fork() has not the threads that serve, for which they would wait.
    if (::getpid() == process_) served_.clear();
  }
  static std::string address_of(const LaunchEnvironment& environment) {
    return fmt::format("{}:{}", environment.master_addr, environment.master_port);
  }
  /// Ranks of one job may be threads of one process.
  static std::string job_of(const LaunchEnvironment& environment) {
    return fmt::format("{} {} rank {} of {}", address_of(environment), environment.run_id, environment.rank,
                       environment.world_size);
  }

  std::mutex mutex_;
  std::map<std::string, int> counts_;
  std::map<std::string, c10::intrusive_ptr<c10d::TCPStore>> served_;
  const pid_t process_ = ::getpid();
};

}  // namespace

void note_rendezvous(const LaunchEnvironment& environment) { Meetings::all().add(environment); }

c10::intrusive_ptr<c10d::Store> connect_store(const LaunchEnvironment& environment, std::chrono::milliseconds timeout) {
  if (environment.world_size == 1) return c10::make_intrusive<c10d::HashStore>();
  c10d::TCPStoreOptions options;
  options.port = environment.master_port;
  Meetings& meetings = Meetings::all();
  options.isServer = environment.rank == 0 && !environment.use_agent_store && !meetings.serves(environment);
  options.waitWorkers = false;  // The backend waits, and can say for whom.
  options.timeout = timeout;
  if (options.isServer) {
    options.masterListenFd = listen_as_master(environment);
  } else {
    wait_for_master(environment, timeout);
  }
  try {
    auto store = c10::make_intrusive<c10d::TCPStore>(environment.master_addr, options);
    if (options.isServer) meetings.serve(environment, store);
    // Two runs that meet at one port must not read each other's keys, nor one run those of its last rendezvous.
    return c10::make_intrusive<c10d::PrefixStore>(
        fmt::format("ddpkit/{}/{}", environment.run_id, meetings.count(environment)), std::move(store));
  } catch (const c10::Error& error) {
    throw RendezvousError(fmt::format("rank {} cannot use the store at {}:{}: {}", environment.rank,
                                      environment.master_addr, environment.master_port, error.what_without_backtrace()),
                          {.call = "rendezvous"});
  }
}

}  // namespace ddpkit
