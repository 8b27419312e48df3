// A store for tests, and a client that sends any bytes.
#pragma once

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <string>

#include "comm/sockets.h"
#include "comm/store/keyed_store.h"
#include "comm/store/store_server.h"
#include "comm/store/wire.h"
#include "support/catch.h"

namespace ddpkit::testing {

/// Only a hanging test reaches it.
inline constexpr std::chrono::seconds kStoreLimit(60);

inline SocketAddress loopback(std::uint16_t port) {
  sockaddr_in ipv4{};
  ipv4.sin_family = AF_INET;
  ipv4.sin_port = htons(port);
  ipv4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  SocketAddress address{.length = sizeof ipv4};
  std::memcpy(&address.bytes, &ipv4, sizeof ipv4);
  return address;
}

/// A store on a free port.
class ServedStore {
 public:
  explicit ServedStore(const store::StoreLimits& limits = {}) {
    int listener = -1;
    port_ = listen_on("127.0.0.1", listener).value();
    server_.emplace(listener, key, run, limits);
  }

  std::uint16_t port() const { return port_; }
  void end() { server_.reset(); }
  c10::intrusive_ptr<store::KeyedStore> join(std::chrono::milliseconds timeout = kStoreLimit) const {
    return c10::make_intrusive<store::KeyedStore>(place(), timeout);
  }
  store::StorePlace place() const {
    return {.address = loopback(port_), .name = "127.0.0.1:" + std::to_string(port_), .key = key, .run = run};
  }

  const store::Digest key = store::random_digest();
  const std::string run = "local-1/0";

 private:
  std::uint16_t port_ = 0;
  std::optional<store::StoreServer> server_;
};

/// A connection that sends any bytes.
class RawClient {
 public:
  explicit RawClient(const ServedStore& served)
      : fd_(connect_to("127.0.0.1", std::to_string(served.port()), kStoreLimit)) {
    REQUIRE(fd_ >= 0);
  }
  ~RawClient() { ::close(fd_); }
  RawClient(const RawClient&) = delete;
  RawClient& operator=(const RawClient&) = delete;

  /// Returns false if the server has closed the connection.
  bool send(std::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
    return true;
  }
  /// Returns the next bytes; fewer if the server closes the connection before.
  std::string receive(std::size_t count) const {
    std::string bytes(count, '\0');
    std::size_t at = 0;
    while (at < count && is_readable(kStoreLimit)) {
      const ssize_t got = ::recv(fd_, bytes.data() + at, count - at, 0);
      if (got <= 0) break;
      at += static_cast<std::size_t>(got);
    }
    return bytes.substr(0, at);
  }
  /// Returns whether the server closes the connection. Skips what it sends before.
  bool is_closed() const {
    for (char buffer[4096]; is_readable(kStoreLimit);) {
      if (::recv(fd_, buffer, sizeof buffer, 0) <= 0) return true;
    }
    return false;
  }
  bool is_readable(std::chrono::milliseconds limit) const {
    pollfd place{fd_, POLLIN, 0};
    return ::poll(&place, 1, static_cast<int>(limit.count())) == 1;
  }
  void end_sending() const { ::shutdown(fd_, SHUT_WR); }

  std::string hello() {
    session.client = store::random_digest();
    return std::string(store::kMagic).append(store::bytes_of(session.client));
  }
  /// Reads the server's nonce and returns the client's proof.
  std::string proof(const store::Digest& key, const std::string& run) {
    session.server = store::digest_of(receive(sizeof(store::Digest)));
    session.run = store::sha256(run);
    const store::Hmac hmac(store::bytes_of(key));
    to_server = store::Direction::to_server(hmac, session);
    to_client = store::Direction::to_client(hmac, session);
    return std::string(store::bytes_of(session.run)).append(store::bytes_of(store::client_proof(hmac, session)));
  }
  /// Completes the handshake.
  void join(const ServedStore& served) {
    REQUIRE(send(hello()));
    REQUIRE(send(proof(served.key, served.run)));
    REQUIRE(receive(store::kVerdictBytes).front() == static_cast<char>(store::Verdict::kWelcome));
  }
  /// Returns the payload of the next reply; empty if its MAC is wrong or the server closes the connection.
  std::string reply() {
    const std::string header = receive(store::kHeaderBytes);
    if (header.size() < store::kHeaderBytes) return {};
    const std::string payload = receive(store::payload_bytes(header)), mac = receive(store::kMacBytes);
    return to_client->accept(payload, mac) ? payload : std::string();
  }

  store::Session session{};
  std::optional<store::Direction> to_server{}, to_client{};

 private:
  int fd_;
};

/// Returns a request that adds 1 to a key.
inline std::string add_one(const std::string& key) {
  return store::Writer(store::Operation::kAdd).text(key).number(1).finish();
}

}  // namespace ddpkit::testing
