// Tier 0: the standard library only. This host: its kernel, cores and memory in bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ddpkit {

/// Of the kernel that runs: the same in all its containers; empty where it has none. Throws Error when it cannot be
/// read.
std::string boot_id();

/// Tells this kernel's namespaces of one kind ("pid", "net", "time") apart; 0 where it has none. Throws Error when it
/// cannot be read: another number would look like another host.
std::uint64_t namespace_number(const char* kind);

/// Cores of this process's affinity mask; {0} if the mask cannot be read.
std::vector<int> allowed_cores();

/// The first line of a file, such as those of /proc and /sys; empty where there is none.
std::string first_line(const std::string& path);

/// The folders of this process's control groups, innermost first, up to the root of the hierarchy: any may limit it.
/// `controller`: "memory", "cpu". `root`: where /proc and /sys are; another one in tests.
std::vector<std::string> cgroup_folders(const std::string& controller, const std::string& root = "");

/// The least limit of this process's control groups (a container's).
std::optional<std::uint64_t> memory_limit(const std::string& root = "");

/// What can be had without swapping, by the kernel's estimate and below the limits of the control groups; 0 when the
/// kernel does not say.
std::size_t available_memory(const std::string& root = "");

/// Addresses that RLIMIT_AS (ulimit -v) leaves this process; empty without that limit.
std::optional<std::size_t> available_addresses();

/// The largest size for one of `arenas` arenas that this process maps, which leaves half of the memory to others.
std::size_t arena_budget(std::size_t arenas);

}  // namespace ddpkit
