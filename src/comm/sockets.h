// Tier 0: the standard library only.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace ddpkit {

/// This host's address on the way to `master`: other hosts reach this host there, whatever name this host has. Empty if
/// there is no way.
std::string address_towards(const std::string& master);

/// `address`, or ::1 where that is 127.0.0.1 and this host has only IPv6.
std::string usable_loopback(const std::string& address);

/// Listens on any port of a numeric address. Empty and errno if that fails.
std::optional<std::uint16_t> listen_on(const std::string& address, int& fd);

/// A connection to a numeric address, or -1 and errno.
int connect_to(const std::string& address, const std::string& port, std::chrono::milliseconds timeout);

}  // namespace ddpkit
