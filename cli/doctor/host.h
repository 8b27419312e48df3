// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "finding.h"

namespace ddpkit::cli {

/// The limits of a process on this host. Bytes.
struct HostLimits {
  int cores = 1;  ///< Cores that this process may run on.
  int cores_of_host = 1;
  std::optional<double> cpu_quota = std::nullopt;             ///< Cores that the container may use (cgroup v2 or v1).
  std::uint64_t memory = 0;                                   ///< Total memory of the host.
  std::uint64_t available = 0;                                ///< Memory available now.
  std::optional<std::uint64_t> memory_limit = std::nullopt;   ///< Limit of the container.
  std::optional<std::uint64_t> address_limit = std::nullopt;  ///< RLIMIT_AS.
  std::uint64_t shm = 0;                                      ///< Size of /dev/shm; 0: not mounted.
  std::uint64_t open_files = 0;                               ///< RLIMIT_NOFILE.
  std::string huge_pages = {};                                ///< Of shared memory: "never", "advise", "always".

  /// Returns the memory that training can use: the minimum of the available memory and the limits.
  std::uint64_t usable_memory() const;
};

/// `root`: the folder of /proc, /sys and /dev; tests pass another one.
HostLimits read_host_limits(const std::string& root = "");

/// `ranks`: ranks to start on this host. `omp_threads`: OMP_NUM_THREADS, if set.
Findings examine_host(const HostLimits& limits, int ranks, const std::optional<std::string>& omp_threads, bool has_gpu);

/// Formats bytes: "1.5 GiB".
std::string in_units(double bytes);

}  // namespace ddpkit::cli
