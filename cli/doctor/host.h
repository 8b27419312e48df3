// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "finding.h"

namespace ddpkit::cli {

/// What limits a process on this host. Bytes.
struct HostLimits {
  int cores = 1;  ///< That this process may run on.
  int cores_of_host = 1;
  std::optional<double> cpu_quota = std::nullopt;             ///< Cores that the container may use, of cgroup v2 or v1.
  std::uint64_t memory = 0;                                   ///< Of the host.
  std::uint64_t available = 0;                                ///< That could be had now.
  std::optional<std::uint64_t> memory_limit = std::nullopt;   ///< Of the container.
  std::optional<std::uint64_t> address_limit = std::nullopt;  ///< RLIMIT_AS.
  std::uint64_t shm = 0;                                      ///< Size of /dev/shm; 0: there is none.
  std::uint64_t open_files = 0;                               ///< RLIMIT_NOFILE.
  std::string huge_pages = {};                                ///< Of shared memory: "never", "advise", "always".

  /// What training may take: the least of what is available and the limits.
  std::uint64_t usable_memory() const;
};

/// `root`: where /proc, /sys and /dev are; another one in tests.
HostLimits read_host_limits(const std::string& root = "");

/// `ranks`: that are to be started here. `omp_threads`: OMP_NUM_THREADS, if it is set.
Findings examine_host(const HostLimits& limits, int ranks, const std::optional<std::string>& omp_threads, bool has_gpu);

/// "1.5 GiB".
std::string in_units(double bytes);

}  // namespace ddpkit::cli
