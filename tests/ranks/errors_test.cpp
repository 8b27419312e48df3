#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <functional>
#include <optional>

#include <ddpkit/comm/error.h>

#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::CollectiveMismatch;
using ddpkit::PeerLost;
using ddpkit::ProcessGroup;
using ddpkit::Timeout;
using ddpkit::testing::another_group;

namespace {

template <class E>
E caught(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error;
  } catch (const std::exception& error) {
    FAIL("threw something else: " << error.what());
  }
  FAIL("threw nothing");
  throw std::logic_error("not reached");
}

}  // namespace

RANK_TEST("ranks that call different collectives all learn who called what", "[shm][errors]", 2, 3) {
  torch::Tensor tensor = torch::zeros({10});
  const auto error = caught<CollectiveMismatch>([&] {
    if (group.rank() == 1) {
      group.broadcast(tensor, 1);
    } else {
      group.all_reduce(tensor);
    }
  });
  CHECK_THAT(error.what(), ContainsSubstring("rank 1 called broadcast of 10 float32 from rank 1"));
  CHECK_THAT(error.what(), ContainsSubstring("called all_reduce(sum) of 10 float32"));
  // The group is over, and says so with the first cause.
  CHECK(std::string(caught<CollectiveMismatch>([&] { group.barrier(); }).what()) == error.what());
}

RANK_TEST("another size is a mismatch on every rank", "[shm][errors]", 2, 3) {
  torch::Tensor tensor = torch::zeros({group.rank() == 0 ? 10 : 11});
  const auto error = caught<CollectiveMismatch>([&] { group.all_reduce(tensor); });
  CHECK_THAT(error.what(), ContainsSubstring("of 11 float32"));
  CHECK(error.context().sequence.has_value());
}

RANK_TEST("another type is a mismatch on every rank", "[shm][errors]", 2) {
  torch::Tensor tensor = torch::zeros({10}, group.rank() == 0 ? at::kFloat : at::kInt);
  CHECK_THAT(caught<CollectiveMismatch>([&] { group.all_reduce(tensor); }).what(), ContainsSubstring("int32"));
}

RANK_TEST("symmetric memory of two sizes is a mismatch on every rank", "[shm][errors]", 2) {
  CHECK_THAT(caught<CollectiveMismatch>([&] { group.allocate({group.rank() == 0 ? 100 : 200}, at::kFloat); }).what(),
             ContainsSubstring("rank 1"));
}

RANK_TEST("too much symmetric memory is an error that tells sizes, and the group goes on", "[shm][errors]", 2) {
  const auto error = caught<ddpkit::Error>([&] { group.allocate({std::int64_t{1} << 42}, at::kFloat); });
  CHECK_THAT(error.what(), ContainsSubstring("16777216.0 MiB asked for"));
  group.barrier();
}

RANK_TEST("wrong arguments are refused before anything is sent", "[shm][errors]", 2) {
  torch::Tensor tensor = torch::zeros({10});
  caught<ddpkit::InvalidArgument>([&] { group.broadcast(tensor, 2); });
  caught<ddpkit::InvalidArgument>([&] { group.all_reduce(torch::zeros({2}, at::kFloat), ddpkit::ReduceOp::kBand); });
  caught<ddpkit::InvalidArgument>([&] { group.all_reduce(torch::Tensor()); });
  group.barrier();
}

TEST_CASE("a killed rank is named to the others", "[ranks][shm][errors]") {
  ddpkit::testing::on_ranks("a killed rank is named to the others", 4,
                            [](ProcessGroup& group) {
                              group.barrier();
                              if (group.rank() == 3) ::kill(::getpid(), SIGKILL);
                              const auto start = std::chrono::steady_clock::now();
                              const auto error = caught<PeerLost>([&] { group.all_reduce(torch::ones({100})); });
                              CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(30));
                              CHECK_THAT(error.what(), ContainsSubstring("rank 3 (pid "));
                              CHECK_THAT(error.what(), ContainsSubstring("all_reduce(sum) of 100 float32"));
                              CHECK(error.context().rank == 3);
                            },
                            {.doomed = {3}});
}

RANK_TEST("a rank that leaves early is named", "[shm][errors]", 2) {
  std::optional<ProcessGroup> inner = another_group(group, "inner", std::chrono::seconds(60));
  if (group.rank() == 1) {
    inner.reset();
  } else {
    const auto error = caught<PeerLost>([&] { inner->barrier(); });
    CHECK_THAT(error.what(), ContainsSubstring("rank 1"));
    CHECK_THAT(error.what(), ContainsSubstring("has left the group"));
  }
  group.barrier();
}

RANK_TEST("a silent rank is named when the timeout ends", "[shm][errors]", 2) {
  const ProcessGroup inner = another_group(group, "inner", std::chrono::milliseconds(700));
  inner.barrier();
  if (group.rank() == 0) {
    const auto error = caught<Timeout>([&] { inner.all_reduce(torch::ones({5})); });
    CHECK_THAT(error.what(), ContainsSubstring("for rank 1"));
    CHECK_THAT(error.what(), ContainsSubstring("last called barrier (number 0)"));
  }
  group.barrier();
}

RANK_TEST("a rank that gives up tells the others why", "[shm][errors]", 3) {
  const ProcessGroup inner = another_group(group, "inner", std::chrono::seconds(60));
  if (group.rank() == 2) {
    inner.abort("the loss is NaN");
  } else {
    const auto error = caught<PeerLost>([&] { inner.barrier(); });
    CHECK_THAT(error.what(), ContainsSubstring("rank 2 gave up: the loss is NaN"));
  }
  group.barrier();
}
