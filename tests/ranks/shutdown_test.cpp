// ProcessGroup::shutdown() on each backend.
#include <signal.h>
#include <torch/torch.h>

#include <chrono>
#include <string>
#include <thread>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <ddpkit/ddpkit.h>

#include "ranks/group_of.h"
#include "support/catch.h"
#include "support/ranks.h"

namespace {

using ddpkit::ProcessGroup;
using ddpkit::testing::group_of;
using std::chrono::milliseconds;

constexpr std::chrono::minutes kNever(10);

void check_refused(const ProcessGroup& group) {
  const auto refuses = ContainsSubstring("the process group was shut down");
  auto tensor = torch::ones({4});
  CHECK_THROWS_WITH(group.all_reduce(tensor), refuses);
  CHECK_THROWS_WITH(group.all_reduce_async(tensor), refuses);
  CHECK_THROWS_WITH(group.broadcast(tensor), refuses);
  CHECK_THROWS_WITH(group.all_gather(tensor), refuses);
  CHECK_THROWS_WITH(group.all_gather_bytes("x"), refuses);
  CHECK_THROWS_WITH(group.send(tensor, 0), refuses);
  CHECK_THROWS_WITH(group.barrier(), refuses);
  CHECK_THROWS_WITH(group.split({0}), refuses);
  CHECK_THROWS_WITH(group.allocate({4}, torch::kFloat), refuses);
  CHECK_THROWS_WITH(group.check(), refuses);
  group.abort("no effect");
  CHECK_THROWS_WITH(group.barrier(), refuses);
}

/// Each rank in turn comes last. The others wait for it, and its last collective still completes.
void check_order(const std::string& backend, const ProcessGroup& group) {
  const int ranks = group.world_size();
  for (int last = 0; last < ranks; ++last) {
    const ProcessGroup inner = group_of(backend, group, kNever);
    auto tensor = torch::full({100000}, group.rank() + 1.0F);
    const std::string key = "last-" + std::to_string(last);
    if (group.rank() == last) {
      std::this_thread::sleep_for(milliseconds(100));
      group.store()->set(key, std::vector<std::uint8_t>{1});
    }
    ddpkit::Work work = inner.all_reduce_async(tensor);
    CHECK(inner.shutdown());
    CHECK(group.store()->check({key}));
    work.wait();
    CHECK((tensor == ranks * (ranks + 1) / 2).all().item<bool>());
    CHECK(inner.shutdown());
    CHECK(inner.world_size() == ranks);
    check_refused(inner);
  }
  group.barrier();
}

/// The last rank does not call shutdown(). The others abort the group, with its number.
void check_missing_rank(const std::string& backend, const ProcessGroup& group) {
  const int last = group.world_size() - 1;
  const ProcessGroup inner = group_of(backend, group, kNever);
  inner.barrier();
  if (group.rank() != last) {
    CHECK_FALSE(inner.shutdown(milliseconds(300)));
    CHECK_FALSE(inner.shutdown(milliseconds(300)));
  }
  group.barrier();
  auto tensor = torch::ones({4});
  std::string message;
  try {
    inner.all_reduce(tensor);
  } catch (const ddpkit::Error& error) {
    message = error.what();
  }
  INFO(message);
  CHECK_THAT(message, ContainsSubstring("rank " + std::to_string(last)));
  CHECK_FALSE(inner.shutdown(milliseconds(300)));
  group.barrier();
}

/// A rank that still trains does not end with the group of a rank that has released its handle.
void check_handle_released_early(const std::string& backend, const ProcessGroup& group) {
  auto inner = std::make_optional(group_of(backend, group, kNever));
  inner->barrier();
  if (group.rank() == 0) inner.reset();
  group.barrier();
  if (inner) CHECK_NOTHROW(inner->check());
  group.barrier();
  if (inner) CHECK_FALSE(inner->shutdown(milliseconds(300)));
  group.barrier();
}

void check_shutdown(const std::string& backend, const ProcessGroup& group) {
  check_order(backend, group);
  check_missing_rank(backend, group);
  check_handle_released_early(backend, group);
}

}  // namespace

RANK_TEST("shutdown ends an shm group in order", "[shutdown]", 1, 2, 3) {
  if (group.world_size() == 1) {
    CHECK(group.shutdown());
    return check_refused(group);
  }
  check_shutdown("shm", group);
  CHECK_THROWS_AS(group.shutdown(milliseconds(0)), ddpkit::InvalidArgument);
}

RANK_TEST("shutdown ends a gloo group in order", "[shutdown][gloo]", 2, 3) { check_shutdown("gloo", group); }

RANK_TEST("shutdown ends a hierarchical group in order", "[shutdown][hierarchical]", 4) {
  check_shutdown("hierarchical", group);
}

RANK_TEST("a backward after the shutdown of its group throws, and so does the backend", "[shutdown]", 2) {
  const ProcessGroup inner = group_of("shm", group, kNever);
  torch::nn::Linear net(64, 64);  // Gradients in the arena, which are reduced without a call of ProcessGroup.
  ddpkit::DistributedDataParallel ddp(net, inner);
  ddp(torch::ones({3, 64})).sum().backward();
  CHECK(inner.shutdown());
  const auto refuses = ContainsSubstring("the process group was shut down");
  CHECK_THROWS_WITH(ddp(torch::ones({3, 64})).sum().backward(), refuses);
  CHECK_THROWS_WITH(ddpkit::Backend::of(inner)->barrier_blocking(), refuses);
  group.barrier();
}

TEST_CASE("shutdown returns false when a rank has been killed", "[ranks][shutdown][gloo]") {
  const auto body = [](ProcessGroup& group) {
    std::vector<ProcessGroup> groups{group_of("shm", group, kNever), group_of("gloo", group, kNever)};
    groups.back().barrier();
    if (group.rank() == 1) ::raise(SIGKILL);
    for (const ProcessGroup& each : groups) {
      CHECK_FALSE(each.shutdown(kNever));
      CHECK_THROWS_WITH(each.check(), ContainsSubstring("rank 1"));
    }
  };
  ddpkit::testing::on_ranks("shutdown returns false when a rank has been killed", 3, body, {.doomed = {1}});
}
