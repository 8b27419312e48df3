// Tier 0: the standard library only.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace ddpkit {

/// Returns this host's address on the route to `master`, at which other hosts can reach it. Empty if there is no route.
std::string address_towards(const std::string& master);

/// Returns `address`, or ::1 if `address` is 127.0.0.1 and this host has only IPv6.
std::string usable_loopback(const std::string& address);

/// Listens on any free port of a numeric address and returns the port. Returns empty and sets errno on failure.
std::optional<std::uint16_t> listen_on(const std::string& address, int& fd);

/// Connects to a numeric address. Returns the descriptor, or -1 and errno.
int connect_to(const std::string& address, const std::string& port, std::chrono::milliseconds timeout);

}  // namespace ddpkit
