#include "launch/numa_binding.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <map>
#include <system_error>

#include <fmt/format.h>

#include <ddpkit/error.h>

namespace ddpkit::launcher {

std::vector<int> parse_cores(const std::string& text) {
  std::vector<int> cores;
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto wrong = [&] { return InvalidArgument(fmt::format("\"{}\" is not a list of cores such as 0-3,8", text)); };
  const auto number = [&] {
    int value = 0;
    const auto [stop, error] = std::from_chars(at, end, value);
    if (error != std::errc() || value < 0) throw wrong();
    at = stop;
    return value;
  };
  while (at < end) {
    const int first = number();
    int last = first;
    if (at < end && *at == '-') {
      ++at;
      last = number();
    }
    if (last < first || last - first > CPU_SETSIZE) throw wrong();
    for (int core = first; core <= last; ++core) cores.push_back(core);
    if (at < end && *at++ != ',') throw wrong();
  }
  return cores;
}

std::vector<std::vector<int>> numa_nodes(const std::vector<int>& allowed, const std::string& root) {
  std::map<int, std::vector<int>> nodes;  // Key: the node number.
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(root + "/sys/devices/system/node", error)) {
    const std::string name = entry.path().filename();
    int number = 0;
    if (!name.starts_with("node") ||
        std::from_chars(name.data() + 4, name.data() + name.size(), number).ec != std::errc())
      continue;
    std::string list;
    std::ifstream(entry.path() / "cpulist") >> list;
    for (const int core : parse_cores(list)) {
      if (std::find(allowed.begin(), allowed.end(), core) != allowed.end()) nodes[number].push_back(core);
    }
  }
  std::vector<std::vector<int>> result;
  for (auto& [number, cores] : nodes) result.push_back(std::move(cores));
  if (result.empty()) result.push_back(allowed);
  return result;
}

std::vector<std::vector<int>> divide_cores(const std::vector<std::vector<int>>& nodes, int ranks, NumaBinding binding) {
  std::vector<std::vector<int>> result(static_cast<std::size_t>(ranks));
  const auto node_count = static_cast<int>(nodes.size());
  std::size_t cores = 0;
  for (const auto& node : nodes) cores += node.size();
  const bool exclusive = binding == NumaBinding::kExclusive && cores >= static_cast<std::size_t>(ranks);
  // A single rank may use the whole host.
  if (binding == NumaBinding::kNone || (!exclusive && (node_count == 1 || ranks == 1))) return result;
  for (int rank = 0; rank < ranks; ++rank) {
    const int index = rank * node_count / ranks;
    const auto& node = nodes[static_cast<std::size_t>(index)];
    // The ranks of this node: from the first rank of node n to the first rank of the next node.
    const auto first_of = [&](int n) { return (n * ranks + node_count - 1) / node_count; };
    const auto here = static_cast<std::size_t>(first_of(index + 1) - first_of(index));
    const auto place = static_cast<std::size_t>(rank - first_of(index));
    auto& own = result[static_cast<std::size_t>(rank)];
    if (exclusive && node.size() >= here) {
      own.assign(node.begin() + static_cast<std::ptrdiff_t>(node.size() * place / here),
                 node.begin() + static_cast<std::ptrdiff_t>(node.size() * (place + 1) / here));
    } else {
      own = node;
    }
  }
  return result;
}

}  // namespace ddpkit::launcher
