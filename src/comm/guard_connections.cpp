// The connections of a guard, and the lines that it receives.
#include "comm/guard.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <utility>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "comm/sockets.h"
#include "comm/trace/event_ring.h"

namespace ddpkit {
namespace {

void send_line(int fd, const std::string& line) noexcept {
  static_cast<void>(::send(fd, line.data(), line.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
}

/// Makes the kernel close a connection to an unreachable host.
void keep_alive(int fd) noexcept {
  const int on = 1, idle = 5, interval = 5, count = 3;
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

/// Returns this process's ID, and its page for ranks on the same host.
std::string own_process(bool one_host) {
  const shm::LifePage page = one_host ? shm::life_page() : shm::LifePage{};
  return fmt::format("{} {} {}", ::getpid(), page.fd, page.key);
}

std::string new_token() {
  std::uint64_t words[2] = {};
  if (::getrandom(words, sizeof words, 0) != sizeof words) throw Error("getrandom() gives no random numbers");
  return fmt::format("{:016x}{:016x}", words[0], words[1]);
}

}  // namespace

std::string GroupGuard::Failure::line() const {
  return fmt::format("fail {} {} {}\n", static_cast<int>(kind), failed_rank, text);
}

std::string GroupGuard::listen(const LaunchEnvironment& environment) {
  const bool one_host = environment.local_world_size == ranks_;
  const std::string address = one_host ? usable_loopback("127.0.0.1") : address_towards(environment.master_addr);
  if (address.empty()) return {};  // There is no route to the other hosts.
  const auto port = listen_on(address, listener_);
  if (!port)
    throw RendezvousError(fmt::format("rank {} cannot listen on {}: {}", name_, address, std::strerror(errno)));
  token_ = new_token();
  return fmt::format("{} {} {} {} {}", address, *port, token_, name_, own_process(one_host));
}

void GroupGuard::connect(const std::string& offer) {
  if (offer.empty()) return;
  std::istringstream words(offer);
  std::string address, port;
  Peer peer;
  words >> address >> port >> token_ >> peer.name;
  read_process(words, peer);
  peer.fd = connect_to(address, port, timeout_);
  if (peer.fd < 0)
    throw RendezvousError(
        fmt::format("rank {} cannot reach rank {} at {}:{}: {}", name_, peer.name, address, port, std::strerror(errno)),
        {.rank = name_, .call = "rendezvous"});
  keep_alive(peer.fd);
  send_line(peer.fd, fmt::format("hello {} {} {}\n", token_, name_, own_process(peer.process.has_value())));
  peers_.push_back(std::move(peer));
}

bool GroupGuard::read_process(std::istream& words, Peer& peer) {
  shm::LifePage page;
  if (!(words >> peer.pid >> page.fd >> page.key)) return false;
  if (page.fd >= 0) peer.process.emplace(peer.pid, page);
  return true;
}

bool GroupGuard::accept() {
  const int fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
  if (fd < 0) return false;
  keep_alive(fd);
  const std::lock_guard lock(mutex_);
  peers_.push_back({.fd = fd});
  return true;
}

void GroupGuard::disconnect(Peer& peer) {
  const std::lock_guard lock(mutex_);
  ::close(std::exchange(peer.fd, -1));
}

bool GroupGuard::read(Peer& peer) {
  char bytes[4096];
  const ssize_t count = ::recv(peer.fd, bytes, sizeof bytes, MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (count <= 0) {
    fail_as_ended(peer);
    return false;
  }
  peer.unread.append(bytes, static_cast<std::size_t>(count));
  for (std::size_t end; (end = peer.unread.find('\n')) != std::string::npos;) {
    const std::string line = peer.unread.substr(0, end + 1);
    peer.unread.erase(0, end + 1);
    if (!take(peer, line)) return false;
  }
  return peer.unread.size() < 2 * kMostText;
}

void GroupGuard::fail_as_ended(const Peer& peer) {
  if (peer.name >= 0)
    fail({FailureKind::kPeerLost, peer.name, fmt::format("rank {} (pid {}) has ended", peer.name, peer.pid)});
}

bool GroupGuard::take(Peer& peer, const std::string& line) {
  std::istringstream words(line);
  std::string word;
  words >> word;
  if (peer.name < 0) return word == "hello" && take_hello(peer, words);
  if (word == "bye") {
    words >> peer.calls.emplace();
    return false;
  }
  if (word == "end") {
    const std::lock_guard lock(mutex_);
    peer.ends = true;
    if (!leads_) all_end_ = true;
  }
  if (word == "fail") take_failure(peer, words, line);
  if (word == "late" || word == "where") {
    LateCall late;
    words >> late.name >> late.number >> late.kind;
    std::getline(words >> std::ws, late.text);
    if (word == "late") {
      ask(std::move(late));
    } else {
      send_line(peer.fd, fmt::format("here {}\n", answer_to(late)));
    }
  }
  if (word == "here") {
    peer.answer.emplace();
    std::getline(words >> std::ws, *peer.answer);
  }
  return true;
}

bool GroupGuard::take_hello(Peer& peer, std::istream& words) {
  std::string token;
  int name = -1;
  if (!(words >> token >> name) || token != token_ || !read_process(words, peer)) return false;
  const std::lock_guard lock(mutex_);
  peer.name = name;
  const bool complete = std::ranges::count_if(peers_, [](const Peer& each) { return each.name >= 0; }) == ranks_ - 1;
  if (complete) ::close(std::exchange(listener_, -1));
  if (failed_) send_line(peer.fd, failure_.line());  // The peer connected after the failure.
  return true;
}

void GroupGuard::take_failure(Peer& peer, std::istream& words, const std::string& line) {
  int kind = 0;
  Failure failure;
  words >> kind >> failure.failed_rank;
  std::getline(words >> std::ws, failure.text);
  failure.kind = static_cast<FailureKind>(kind);
  note(failure);
  send_to_all(line, &peer);
}

void GroupGuard::send_to_all(const std::string& line, const Peer* but) noexcept {
  const std::lock_guard lock(mutex_);
  for (const Peer& peer : peers_) {
    if (&peer != but && peer.name >= 0 && peer.fd >= 0) send_line(peer.fd, line);
  }
}

}  // namespace ddpkit
