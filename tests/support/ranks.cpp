#include "support/ranks.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <ddpkit/comm/shm_backend.h>

#include "launch/reserved_port.h"
#include "support/catch.h"
#include "support/children.h"
#include "support/folder.h"

namespace ddpkit::testing {
namespace {

std::string marker(const std::filesystem::path& folder, int rank) {
  return folder / ("finished-" + std::to_string(rank));
}

void set_environment(int rank, int ranks, int port, const std::filesystem::path& folder,
                     const RankTestOptions& options) {
  std::vector<std::pair<std::string, std::string>> variables{{"RANK", std::to_string(rank)},
                                                             {"LOCAL_RANK", std::to_string(rank)},
                                                             {"WORLD_SIZE", std::to_string(ranks)},
                                                             {"LOCAL_WORLD_SIZE", std::to_string(ranks)},
                                                             {"MASTER_ADDR", "127.0.0.1"},
                                                             {"MASTER_PORT", std::to_string(port)},
                                                             {"OMP_NUM_THREADS", "1"},
                                                             {"DDPKIT_TEST_FOLDER", folder.string()}};
  variables.insert(variables.end(), options.environment.begin(), options.environment.end());
  for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  // libgomp read OMP_NUM_THREADS when it was loaded.
  at::set_num_threads(1);
}

/// Forked ranks have the same memory layout. This shifts their later mappings to different addresses, so that a pointer
/// of one rank is invalid in another.
void shift_addresses(int rank) {
  const auto bytes = static_cast<std::size_t>(rank + 1) << 24;
  if (::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) == MAP_FAILED)
    throw std::bad_alloc();
}

void run_as_rank(int ranks, const std::function<void(ProcessGroup&)>& body, const std::filesystem::path& folder,
                 const RankTestOptions& options) {
  ProcessGroup group =
      init_process_group({.backend = options.backend, .device = options.device, .timeout = std::chrono::seconds(60)});
  if (group.world_size() != ranks) FAIL("the group has " << group.world_size() << " ranks instead of " << ranks);
  body(group);
  std::ofstream(marker(folder, group.rank())) << "ok";
}

}  // namespace

void on_ranks(const std::string& name, int ranks, const std::function<void(ProcessGroup&)>& body,
              const RankTestOptions& options) {
  const Folder folder;
  const launcher::ReservedPort port;
  const auto run_rank = [&](int rank) {
    set_environment(rank, ranks, port.number(), folder.path(), options);
    shift_addresses(rank);
    const int failed_before = failed_assertions();
    try {
      CHECK_NOTHROW(run_as_rank(ranks, body, folder.path(), options));
    } catch (const Catch::TestFailureException&) {
      // Catch2 has already reported the failed REQUIRE.
    }
    return failed_assertions() > failed_before ? 1 : 0;
  };
  const ChildrenResult result = run_children(
      ranks, run_rank,
      {.time_limit = options.time_limit * DDPKIT_TEST_TIME_FACTOR, .stop_on_failure = options.doomed.empty()});
  const auto output = [&](int rank) { return result.ends[static_cast<std::size_t>(rank)].output; };
  if (result.timed_out) {
    for (int rank = 0; rank < ranks; ++rank) UNSCOPED_INFO("output of rank " << rank << ":\n" << output(rank));
    FAIL("the ranks of '" << name << "' did not end in time: a hang");
  }
  const auto doomed = [&](int rank) { return std::ranges::count(options.doomed, rank) > 0; };
  std::string failed;  // Of all ranks: the failure of one is often the cause of another's.
  for (int rank = 0; rank < ranks; ++rank) {
    const ChildEnd& end = result.ends[static_cast<std::size_t>(rank)];
    if (!end.ok() && !doomed(rank) && !end.stopped)
      failed += fmt::format("rank {} of {} {}; its output:\n{}\n", rank, ranks, end.describe(), end.output);
  }
  if (!failed.empty()) FAIL(failed);

  for (int rank = 0; rank < ranks; ++rank) {
    INFO("rank " << rank << " of " << ranks << ", whose output is:\n" << output(rank));
    REQUIRE(std::filesystem::exists(marker(folder.path(), rank)) != doomed(rank));
  }
}

void on_ranks(const std::string& name, std::initializer_list<int> world_sizes,
              const std::function<void(ProcessGroup&)>& body, const RankTestOptions& options) {
  for (const int ranks : world_sizes) on_ranks(name, ranks, body, options);
}

ProcessGroup another_group(const ProcessGroup& group, const std::string& name, std::chrono::milliseconds timeout) {
  auto store = c10::make_intrusive<c10d::PrefixStore>(name, group.store());
  return ProcessGroup(create_shm_backend(store, group.rank(), group.world_size(), timeout), store, at::kCPU);
}

}  // namespace ddpkit::testing
