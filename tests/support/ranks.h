// Runs a test's body on several ranks, each in a separate process.
#pragma once

#include <chrono>
#include <functional>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include <ddpkit/comm/process_group.h>

namespace ddpkit::testing {

struct RankTestOptions {
  std::string backend = "shm";
  /// Of all ranks: they share one GPU.
  at::Device device = at::kCPU;
  /// Only a hanging run reaches this limit.
  std::chrono::milliseconds time_limit = std::chrono::seconds(120);
  /// Ranks that the test kills: they must not finish, and the others must.
  std::vector<int> doomed = {};
  /// Added to the ranks' environment.
  std::vector<std::pair<std::string, std::string>> environment = {};
};

/// Forks `ranks` processes, which join one group and run `body`. Fails with the output of the rank that failed, if a
/// rank hangs, or if fewer than `ranks` ranks ran to the end. No operator of LibTorch may run before in this test case:
/// LibTorch's threads do not survive a fork. `name` is the test case's.
/// A rank sees the variables of a launcher, OMP_NUM_THREADS=1, and in DDPKIT_TEST_FOLDER a folder that all ranks share.
void on_ranks(const std::string& name, int ranks, const std::function<void(ProcessGroup&)>& body,
              const RankTestOptions& options = {});

/// Creates another group of the same ranks, which connects through the first group's store. `name` must be unique.
ProcessGroup another_group(const ProcessGroup& group, const std::string& name,
                           std::chrono::milliseconds timeout = std::chrono::seconds(60));

/// Runs several world sizes, one after the other.
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
