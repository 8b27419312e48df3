// Tier 0: the standard library only. The master's address of a rendezvous: who listens there, and who connects.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include <ddpkit/comm/environment.h>

namespace ddpkit {

struct SocketAddress {
  sockaddr_storage bytes{};
  socklen_t length = 0;
};

/// Opens the socket of the store at the master's address. If the address is loopback, listens only on loopback, so
/// other hosts cannot connect. Throws RendezvousError.
int listen_as_master(const LaunchEnvironment& environment);
/// The same if the address belongs to this host and no other process listens there. Otherwise returns nothing.
std::optional<int> listen_if_first(const LaunchEnvironment& environment);

/// Returns the address when a process listens at the master's address. `host`: who should listen, for messages. Rank
/// -1: this process is a launcher. `check`: called before each attempt; may throw. c10d's client would sleep one second
/// between attempts. Throws RendezvousError.
SocketAddress wait_for_master(
    const LaunchEnvironment& environment, const std::string& host, std::chrono::milliseconds timeout,
    const std::function<void()>& check = [] {});

}  // namespace ddpkit
