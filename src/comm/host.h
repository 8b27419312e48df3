// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <string>

namespace ddpkit {

/// Of the kernel that runs: the same in all its containers; empty where it has none. Throws Error when it cannot be
/// read.
std::string boot_id();

/// Tells this kernel's namespaces of one kind ("pid", "net", "time") apart; 0 where it has none. Throws Error when it
/// cannot be read: another number would look like another host.
std::uint64_t namespace_number(const char* kind);

}  // namespace ddpkit
