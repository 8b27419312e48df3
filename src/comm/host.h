// Tier 0: the standard library only. Kernel, cores and memory of this host. Sizes are in bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ddpkit {

/// Returns the boot ID of the running kernel: the same in all containers of a host; empty if there is none. Throws
/// Error if it cannot be read.
std::string boot_id();

/// Returns a number that identifies this process's namespace of a kind ("pid", "net", "time"); 0 if the kernel has
/// none.
/// Throws Error if it cannot be read, because another number would look like another host.
std::uint64_t namespace_number(const char* kind);

/// Returns the cores of this process's affinity mask; {0} if the mask cannot be read.
std::vector<int> allowed_cores();

/// Returns the first line of a file, such as those of /proc and /sys; empty if there is no such file.
std::string first_line(const std::string& path);

/// Returns the folders of this process's control groups, innermost first, up to the root of the hierarchy. Each may
/// have a limit. `controller`: "memory", "cpu". `root`: prefix of /proc and /sys, for tests.
std::vector<std::string> cgroup_folders(const std::string& controller, const std::string& root = "");

/// Returns the smallest memory limit of this process's control groups (a container's).
std::optional<std::uint64_t> memory_limit(const std::string& root = "");

/// Returns the memory available without swapping: the kernel's estimate, at most the limits of the control groups; 0 if
/// unknown.
std::size_t available_memory(const std::string& root = "");

/// Returns the address space that RLIMIT_AS (ulimit -v) leaves for this process; empty without a limit.
std::optional<std::size_t> available_addresses();

/// Returns the maximum size of one of `arenas` arenas, so that all arenas together use at most half of the memory.
std::size_t arena_budget(std::size_t arenas);

}  // namespace ddpkit
