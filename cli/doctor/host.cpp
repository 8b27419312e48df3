#include "host.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include <fmt/format.h>

#include <ddpkit/parse_number.h>

#include "comm/host.h"

namespace ddpkit::cli {
namespace {

constexpr double kMiB = 1 << 20, kGiB = 1 << 30;
constexpr double kRankBytes = 150 * kMiB;  ///< A rank with only LibTorch's CPU libraries.
/// Address space of a CPU rank: LibTorch, plus the gradient arena of each rank of the host. An arena without arena_mb
/// and limits has at least this size.
constexpr double kRankAddresses = 600 * kMiB, kArenaAddresses = kGiB;

std::optional<std::uint64_t> number_in(const std::string& text) {
  std::uint64_t value = 0;
  return parse_number(text, value) ? std::optional(value) : std::nullopt;
}

std::optional<double> cpu_quota(const std::string& root) {
  std::optional<double> least;
  const auto consider = [&](const std::string& quota, const std::string& period) {
    const auto q = number_in(quota), p = number_in(period);
    if (!q || !p || *p == 0) return;
    const double cores = static_cast<double>(*q) / static_cast<double>(*p);
    if (!least || cores < *least) least = cores;
  };
  for (const std::string& folder : cgroup_folders("cpu", root)) {
    std::istringstream v2(first_line(folder + "/cpu.max"));
    std::string quota, period;
    if (v2 >> quota >> period) consider(quota, period);
    consider(first_line(folder + "/cpu.cfs_quota_us"), first_line(folder + "/cpu.cfs_period_us"));
  }
  return least;
}

/// Returns the word in brackets: "always within_size [advise] never".
std::string chosen_word(const std::string& line) {
  const std::size_t open = line.find('['), close = line.find(']');
  return open == std::string::npos || close == std::string::npos ? "" : line.substr(open + 1, close - open - 1);
}

std::optional<std::uint64_t> soft_limit(__rlimit_resource resource) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return limit.rlim_cur;
}

}  // namespace

std::string in_units(double bytes) {
  if (bytes >= kGiB) return fmt::format("{:.1f} GiB", bytes / kGiB);
  if (bytes >= kMiB) return fmt::format("{:.1f} MiB", bytes / kMiB);
  return fmt::format("{:.0f} KiB", bytes / 1024);
}

std::uint64_t HostLimits::usable_memory() const {
  std::uint64_t least = available;
  if (memory_limit) least = std::min(least, *memory_limit);
  if (address_limit) least = std::min(least, *address_limit);
  return least;
}

HostLimits read_host_limits(const std::string& root) {
  HostLimits limits;
  cpu_set_t all;
  CPU_ZERO(&all);
  if (::sched_getaffinity(0, sizeof all, &all) == 0) limits.cores = CPU_COUNT(&all);
  limits.cores_of_host = static_cast<int>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
  limits.cpu_quota = cpu_quota(root);
  std::ifstream meminfo(root + "/proc/meminfo");
  for (std::string name; meminfo >> name;) {
    std::uint64_t kilobytes = 0;
    std::string rest;
    meminfo >> kilobytes;
    std::getline(meminfo, rest);
    if (name == "MemTotal:") limits.memory = kilobytes * 1024;
    if (name == "MemAvailable:") limits.available = kilobytes * 1024;
  }
  limits.memory_limit = memory_limit(root);
  limits.address_limit = soft_limit(RLIMIT_AS);
  struct statvfs shm {};
  if (::statvfs((root + "/dev/shm").c_str(), &shm) == 0) limits.shm = shm.f_blocks * shm.f_frsize;
  limits.open_files = soft_limit(RLIMIT_NOFILE).value_or(1 << 20);
  limits.huge_pages = chosen_word(first_line(root + "/sys/kernel/mm/transparent_hugepage/shmem_enabled"));
  return limits;
}

Findings examine_host(const HostLimits& limits, int ranks, const std::optional<std::string>& omp_threads,
                      bool has_gpu) {
  Findings findings;
  const auto add = [&](Severity severity, std::string what, std::string advice = {}, double gain = 0) {
    findings.push_back({"host", severity, std::move(what), std::move(advice), gain});
  };
  const double cores = limits.cpu_quota ? std::min<double>(limits.cores, *limits.cpu_quota) : limits.cores;
  add(Severity::kFine,
      fmt::format(
          "{} of {} cores may be used{}", limits.cores, limits.cores_of_host,
          limits.cpu_quota ? fmt::format(", of which the container's quota leaves {:.1f}", *limits.cpu_quota) : ""));
  if (ranks > cores)
    add(Severity::kAdvice, fmt::format("{} ranks share {:.3g} cores", ranks, cores),
        has_gpu
            ? fmt::format("Give this host or container {} cores: each GPU needs one for the rank that feeds it.", ranks)
            : fmt::format("Start at most {} CPU ranks here: more wait for each other's cores.",
                          std::max(1, static_cast<int>(cores))),
        ranks / cores);
  const int fair = std::max(1, static_cast<int>(cores) / ranks);
  if (!omp_threads || omp_threads->empty()) {
    add(Severity::kFine, fmt::format("OMP_NUM_THREADS is not set: ddpkit run sets {} for each rank", fair));
  } else if (const auto threads = number_in(*omp_threads); !threads || *threads == 0) {
    add(Severity::kProblem, fmt::format("OMP_NUM_THREADS is \"{}\", which is no number of threads", *omp_threads),
        fmt::format("Set OMP_NUM_THREADS={}, or unset it.", fair));
  } else if (static_cast<double>(*threads) * ranks > cores) {
    const double times = static_cast<double>(*threads) * ranks / cores;
    add(Severity::kAdvice,
        fmt::format("OMP_NUM_THREADS={} on {} ranks: {} threads share {:.3g} cores, and spin against each other",
                    *threads, ranks, *threads * static_cast<std::uint64_t>(ranks), cores),
        fmt::format("Set OMP_NUM_THREADS={}, or unset it: oversubscribed threads make a step several times as long.",
                    fair),
        std::max(2.0, times));
  } else {
    add(Severity::kFine, fmt::format("OMP_NUM_THREADS={} on {} ranks fits the cores", *threads, ranks));
  }
  // RLIMIT_AS limits each process separately and counts mapped memory, not resident memory. So it is a separate
  // finding.
  const auto usable = static_cast<double>(std::min(limits.available, limits.memory_limit.value_or(limits.available)));
  std::string bound;
  if (limits.memory_limit)
    bound += fmt::format(", the container's limit is {}", in_units(static_cast<double>(*limits.memory_limit)));
  if (limits.address_limit)
    bound += fmt::format(", RLIMIT_AS is {}", in_units(static_cast<double>(*limits.address_limit)));
  const bool enough = usable >= kRankBytes * ranks;
  add(enough ? Severity::kFine : Severity::kProblem,
      fmt::format("memory: {} of {} available{}", in_units(static_cast<double>(limits.available)),
                  in_units(static_cast<double>(limits.memory)), bound),
      enough ? ""
             : fmt::format("{} ranks need {} without a model: start fewer, or raise the limit.", ranks,
                           in_units(kRankBytes * ranks)));
  if (enough && usable < 2 * kGiB)
    add(Severity::kAdvice, fmt::format("only {} may be used", in_units(usable)),
        "Raise the memory limit of the container (docker run --memory), or see below what a model takes: "
        "ddpkit doctor --params N.");
  const double addresses = kRankAddresses + kArenaAddresses * std::max(2, ranks);
  if (const auto most = static_cast<double>(limits.address_limit.value_or(0));
      !has_gpu && most > 0 && most < addresses) {
    const bool too_little = most < 1.1 * kRankAddresses;
    add(too_little ? Severity::kProblem : Severity::kAdvice,
        fmt::format("a process may map {} (RLIMIT_AS), but {}", in_units(most),
                    too_little ? fmt::format("LibTorch alone maps about {}", in_units(kRankAddresses))
                               : fmt::format("each of {} ranks maps {} where it can: the arena of gradients shrinks",
                                             std::max(2, ranks), in_units(addresses))),
        "Lift the limit (ulimit -v unlimited), or start fewer ranks.");
  }
  if (limits.shm < 64 * kMiB)
    add(has_gpu ? Severity::kAdvice : Severity::kFine,
        fmt::format("/dev/shm holds {}: the backend shm does not use it{}", in_units(static_cast<double>(limits.shm)),
                    has_gpu ? ", but NCCL does between GPUs of a host that have no peer access" : ""),
        has_gpu ? "Give the container more shared memory (docker run --shm-size=1g): NCCL fails without." : "", 1);
  else
    add(Severity::kFine, fmt::format("/dev/shm holds {}", in_units(static_cast<double>(limits.shm))));
  if (limits.open_files < 1024)
    add(Severity::kAdvice, fmt::format("a process may have {} files open", limits.open_files),
        "Raise it (ulimit -n 4096): each rank holds several for each other rank.");
  if (limits.huge_pages == "never")
    add(Severity::kAdvice, "shared memory gets no huge pages (transparent_hugepage/shmem_enabled is never)",
        "As root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled. Large all-reduces touch fewer "
        "pages then.",
        1.05);
  return findings;
}

}  // namespace ddpkit::cli
