// Runs a test's body on several ranks, each a process of its own.
#pragma once

#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include <ddpkit/comm/local_launch.h>
#include <ddpkit/comm/process_group.h>

namespace ddpkit::testing {

struct RankTestOptions {
  std::string backend = "shm";
  /// Of every rank: a GPU is shared by all.
  at::Device device = at::kCPU;
  /// Longer than any sane run: only a hang reaches it.
  std::chrono::milliseconds time_limit = std::chrono::seconds(120);
  /// Ranks that the test kills: they must not run to the end, and the others must.
  std::vector<int> doomed = {};
  /// Added to the ranks' environment.
  std::vector<std::pair<std::string, std::string>> environment = {};
};

/// The test called `name` (its full Catch2 name) on `ranks` processes. In the test's own process: starts this program
/// once a rank with that test alone, waits, and fails with the output of the rank that failed, when one hangs, or when
/// fewer ranks ran to the end than were asked for. In a rank's process: joins the group and runs `body`.
void on_ranks(const std::string& name, int ranks, const std::function<void(ProcessGroup&)>& body,
              const RankTestOptions& options = {});

/// Another group of the same ranks, which meets through the first one's store; `name` is its own.
ProcessGroup another_group(const ProcessGroup& group, const std::string& name,
                           std::chrono::milliseconds timeout = std::chrono::seconds(60));

/// The same for several world sizes, one after the other.
void on_ranks(const std::string& name, std::initializer_list<int> world_sizes,
              const std::function<void(ProcessGroup&)>& body, const RankTestOptions& options = {});

}  // namespace ddpkit::testing

/// RANK_TEST("all-reduce sums", "[shm]", 2, 4) { ... group ... }
#define RANK_TEST(name, tags, ...) DDPKIT_RANK_TEST(name, tags, __COUNTER__, __VA_ARGS__)
#define DDPKIT_RANK_TEST(name, tags, id, ...) DDPKIT_RANK_TEST_(name, tags, id, __VA_ARGS__)
#define DDPKIT_RANK_TEST_(name, tags, id, ...)                                                             \
  static void rank_test_body_##id([[maybe_unused]] ddpkit::ProcessGroup& group);                           \
  TEST_CASE(name, "[ranks]" tags) { ddpkit::testing::on_ranks(name, {__VA_ARGS__}, rank_test_body_##id); } \
  static void rank_test_body_##id([[maybe_unused]] ddpkit::ProcessGroup& group)
