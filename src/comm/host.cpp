#include "comm/host.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>

#include <fmt/format.h>

#include <ddpkit/comm/environment.h>
#include <ddpkit/error.h>
#include <ddpkit/parse_number.h>

namespace ddpkit {
namespace {

[[noreturn]] void throw_unreadable(const char* call, const std::string& path) {
  throw Error(fmt::format("{} of {} failed: {}; the ranks compare it to find out whether they are on one host", call,
                          path, std::strerror(errno)));
}

constexpr std::uint64_t kUnlimited = std::uint64_t{1} << 60;  ///< cgroup v1 writes about this number for "no limit".

std::optional<std::uint64_t> number_in(const std::string& text) {
  std::uint64_t value = 0;
  return parse_number(text, value) ? std::optional(value) : std::nullopt;
}

/// Returns the number after `wanted` in a file with lines "name number".
std::optional<std::uint64_t> entry(const std::string& path, const std::string& wanted) {
  std::ifstream file(path);
  std::string name, value, rest;
  while (file >> name >> value && std::getline(file, rest)) {
    if (name == wanted) return number_in(value);
  }
  return std::nullopt;
}

/// File names of one version of control groups.
struct MemoryFiles {
  const char *limit, *usage, *inactive, *active;
};
constexpr MemoryFiles kMemoryFiles[] = {
    {"/memory.max", "/memory.current", "inactive_file", "active_file"},
    {"/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file", "total_active_file"},
};

/// Calls `see` with each limit and the amount left below the limit.
template <class See>
void for_each_limit(const std::string& root, const See& see) {
  for (const std::string& folder : cgroup_folders("memory", root)) {
    for (const MemoryFiles& files : kMemoryFiles) {
      const auto limit = number_in(first_line(folder + files.limit));  // "max" means no limit.
      if (!limit || *limit >= kUnlimited) continue;
      const std::uint64_t usage = number_in(first_line(folder + files.usage)).value_or(0);
      const std::string stat = folder + "/memory.stat";
      const std::uint64_t reclaimable = entry(stat, files.inactive).value_or(0) + entry(stat, files.active).value_or(0);
      const std::uint64_t taken = usage - std::min(usage, reclaimable);
      see(*limit, *limit - std::min(*limit, taken));
    }
  }
}

}  // namespace

std::string boot_id() {
  const std::string path = "/proc/sys/kernel/random/boot_id";
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0 && errno == ENOENT) return {};
  if (fd < 0) throw_unreadable("open", path);
  char text[64];
  const ssize_t length = ::read(fd, text, sizeof text);
  const int error = errno;
  ::close(fd);
  errno = error;
  if (length < 0) throw_unreadable("read", path);
  return {text, std::find(text, text + length, '\n')};
}

std::uint64_t namespace_number(const char* kind) {
  const std::string path = std::string("/proc/self/ns/") + kind;
  struct stat space {};
  if (::stat(path.c_str(), &space) == 0) return space.st_ino;
  if (errno != ENOENT) throw_unreadable("stat", path);
  return 0;
}

std::vector<int> allowed_cores() {
  std::vector<int> cores;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return {0};
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

int available_cores() { return static_cast<int>(allowed_cores().size()); }

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::vector<std::string> cgroup_folders(const std::string& controller, const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_v2 = controllers.empty();
    if (!is_v2 && ("," + controllers + ",").find("," + controller + ",") == std::string::npos) continue;
    const std::string base = root + "/sys/fs/cgroup" + (is_v2 ? "" : "/" + controller);
    std::string group = line.substr(second + 1);
    std::vector<std::string> folders;
    for (; !group.empty() && group != "/"; group.erase(group.rfind('/'))) folders.push_back(base + group);
    folders.push_back(base);
    // In a hybrid hierarchy, v2 has no controllers; the line of v1 has the folder.
    if (is_v2 && !std::ifstream(base + "/cgroup.controllers")) continue;
    return folders;
  }
  return {root + "/sys/fs/cgroup"};
}

std::optional<std::uint64_t> memory_limit(const std::string& root) {
  std::optional<std::uint64_t> least;
  for_each_limit(root, [&](std::uint64_t limit, std::uint64_t) { least = std::min(limit, least.value_or(limit)); });
  return least;
}

std::size_t available_memory(const std::string& root) {
  const auto kilobytes = entry(root + "/proc/meminfo", "MemAvailable:");
  if (!kilobytes) return 0;
  std::uint64_t least = *kilobytes * 1024;
  // For a full container returns 1, because 0 means unknown.
  for_each_limit(root,
                 [&](std::uint64_t, std::uint64_t left) { least = std::min(least, std::max<std::uint64_t>(left, 1)); });
  return least;
}

std::optional<std::size_t> available_addresses() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  const std::string sizes = first_line("/proc/self/statm");  // In pages; the first number is the mapped size.
  const std::uint64_t pages = number_in(sizes.substr(0, sizes.find(' '))).value_or(0);
  const std::uint64_t mapped = pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return limit.rlim_cur - std::min<std::uint64_t>(limit.rlim_cur, mapped);
}

std::size_t arena_budget(std::size_t arenas) {
  const std::size_t least =
      std::min(available_memory(), available_addresses().value_or(std::numeric_limits<std::size_t>::max()));
  return least / 2 / std::max<std::size_t>(1, arenas);
}

}  // namespace ddpkit
