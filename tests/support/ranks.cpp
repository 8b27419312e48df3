#include "support/ranks.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <ddpkit/comm/shm_backend.h>

#include "support/catch.h"
#include "support/folder.h"

namespace ddpkit::testing {
namespace {

constexpr const char* kWorldVariable = "DDPKIT_TEST_WORLD";
constexpr const char* kFolderVariable = "DDPKIT_TEST_FOLDER";

std::string marker(const std::string& folder, int rank) { return fmt::format("{}/finished-{}", folder, rank); }

/// Catch2 reads commas, brackets and asterisks of a name as its own syntax.
std::string escaped(const std::string& name) {
  std::string text;
  for (const char c : name) {
    if (c == ',' || c == '[' || c == ']' || c == '\\' || c == '*') text += '\\';
    text += c;
  }
  return text;
}

void run_as_rank(const std::function<void(ProcessGroup&)>& body, const RankTestOptions& options) {
  ProcessGroup group =
      init_process_group({.backend = options.backend, .device = options.device, .timeout = std::chrono::seconds(60)});
  const int wanted = std::atoi(std::getenv(kWorldVariable));
  if (group.world_size() != wanted) FAIL("the group has " << group.world_size() << " ranks instead of " << wanted);
  body(group);
  std::ofstream(marker(std::getenv(kFolderVariable), group.rank())) << "ok";
}

}  // namespace

void on_ranks(const std::string& name, int ranks, const std::function<void(ProcessGroup&)>& body,
              const RankTestOptions& options) {
  if (const char* world = std::getenv(kWorldVariable)) {
    // A test that calls on_ranks several times reaches the call it was started for.
    if (std::atoi(world) == ranks) run_as_rank(body, options);
    return;
  }
  const Folder folder;
  std::map<int, std::string> output;
  std::vector<std::pair<std::string, std::string>> environment{
      {kWorldVariable, std::to_string(ranks)}, {kFolderVariable, folder.path().string()}, {"OMP_NUM_THREADS", "1"}};
  environment.insert(environment.end(), options.environment.begin(), options.environment.end());
  const LocalLaunchResult result =
      local_launch({.command = {std::filesystem::read_symlink("/proc/self/exe").string(), escaped(name)},
                    .ranks = ranks,
                    .environment = environment,
                    .time_limit = options.time_limit * DDPKIT_TEST_TIME_FACTOR,
                    .grace = std::chrono::seconds(1),
                    .stop_on_failure = options.doomed.empty(),
                    .on_output = [&output](int rank, const std::string& text) { output[rank] += text; }});
  if (result.timed_out) {
    for (int rank = 0; rank < ranks; ++rank) UNSCOPED_INFO("output of rank " << rank << ":\n" << output[rank]);
    FAIL("the ranks did not end in time: a hang");
  }
  const auto doomed = [&](int rank) {
    return std::find(options.doomed.begin(), options.doomed.end(), rank) != options.doomed.end();
  };
  for (const RankExit& end : result.ranks) {
    if (!end.ok() && !doomed(end.rank) && !end.ended_by_launcher)
      FAIL("rank " << end.rank << " of " << ranks << " " << end.describe() << "; its output:\n" << output[end.rank]);
  }
  for (int rank = 0; rank < ranks; ++rank) {
    INFO("rank " << rank << " of " << ranks << ", whose output is:\n" << output[rank]);
    REQUIRE(std::filesystem::exists(marker(folder.path(), rank)) != doomed(rank));
  }
}

ProcessGroup another_group(const ProcessGroup& group, const std::string& name, std::chrono::milliseconds timeout) {
  auto store = c10::make_intrusive<c10d::PrefixStore>(name, group.store());
  return ProcessGroup(create_shm_backend(store, group.rank(), group.world_size(), timeout), store, at::kCPU);
}

void on_ranks(const std::string& name, std::initializer_list<int> world_sizes,
              const std::function<void(ProcessGroup&)>& body, const RankTestOptions& options) {
  for (const int ranks : world_sizes) on_ranks(name, ranks, body, options);
}

}  // namespace ddpkit::testing
