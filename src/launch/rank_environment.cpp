#include "launch/rank_environment.h"

#include <unistd.h>

#include <algorithm>
#include <map>

#include <fmt/format.h>

#include <ddpkit/comm/environment.h>

#include "comm/trace/page.h"

extern char** environ;

namespace ddpkit::launch {

std::vector<std::string> rank_environment(const LocalLaunchOptions& options, int rank, int port, int page) {
  std::map<std::string, std::string> variables;
  for (char** at = environ; *at; ++at) {
    const std::string entry = *at;
    const auto equals = entry.find('=');
    if (equals != std::string::npos) variables[entry.substr(0, equals)] = entry.substr(equals + 1);
  }
  variables["RANK"] = std::to_string(options.node_rank * options.ranks + rank);
  variables["LOCAL_RANK"] = std::to_string(rank);
  variables["GROUP_RANK"] = std::to_string(options.node_rank);
  variables["WORLD_SIZE"] = std::to_string(options.nodes * options.ranks);
  variables["LOCAL_WORLD_SIZE"] = std::to_string(options.ranks);
  variables["MASTER_ADDR"] = options.master_addr;
  variables["MASTER_PORT"] = std::to_string(port);
  // Equal on all hosts. The hosts share only the rendezvous address.
  variables["TORCHELASTIC_RUN_ID"] =
      options.nodes > 1 ? fmt::format("nodes-{}", port) : fmt::format("local-{}", ::getpid());
  variables["TORCHELASTIC_RESTART_COUNT"] = std::to_string(options.restart_count);
  variables["TORCHELASTIC_MAX_RESTARTS"] = std::to_string(options.max_restarts);
  variables.erase("TORCHELASTIC_USE_AGENT_STORE");
  variables[flight::kPageVariable] = std::to_string(page);
  variables.emplace("OMP_NUM_THREADS", std::to_string(std::max(1, available_cores() / options.ranks)));
  for (const auto& [name, value] : options.environment) variables[name] = value;
  std::vector<std::string> entries;
  for (const auto& [name, value] : variables) entries.push_back(name + "=" + value);
  return entries;
}

}  // namespace ddpkit::launch
