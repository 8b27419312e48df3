#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <thread>

#define USE_C10D_GLOO  // The header is empty without it.
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/comm/shm_backend.h>
#include <ddpkit/error.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/port.h"
#include "support/ranks.h"

using ddpkit::init_process_group;
using ddpkit::LaunchEnvironment;
using ddpkit::testing::TakenPort;

namespace {

/// Returns a port on which no process listens.
std::uint16_t free_port() { return TakenPort().port(); }

LaunchEnvironment rank_of_two(int rank, std::uint16_t port, const std::string& address = "127.0.0.1") {
  LaunchEnvironment environment;
  environment.rank = environment.local_rank = rank;
  environment.world_size = environment.local_world_size = 2;
  environment.master_addr = address;
  environment.master_port = port;
  return environment;
}

}  // namespace

TEST_CASE("a taken master port is an error with the port", "[rendezvous]") {
  const TakenPort taken;
  CHECK_THROWS_AS(init_process_group({.backend = "shm", .environment = rank_of_two(0, taken.port())}),
                  ddpkit::RendezvousError);
  CHECK_THROWS_WITH(init_process_group({.backend = "shm", .environment = rank_of_two(0, taken.port())}),
                    ContainsSubstring("MASTER_PORT " + std::to_string(taken.port()) + " is already taken"));
}

TEST_CASE("an unreachable master is an error when the timeout ends", "[rendezvous]") {
  const std::uint16_t port = free_port();
  CHECK_THROWS_WITH(
      init_process_group(
          {.backend = "shm", .timeout = std::chrono::milliseconds(300), .environment = rank_of_two(1, port)}),
      ContainsSubstring("cannot reach rank 0 at 127.0.0.1:" + std::to_string(port)));
}

TEST_CASE("ranks that do not come are named", "[rendezvous]") {
  const std::uint16_t port = free_port();
  CHECK_THROWS_WITH(
      init_process_group(
          {.backend = "shm", .timeout = std::chrono::milliseconds(300), .environment = rank_of_two(0, port)}),
      ContainsSubstring("timed out: rank 1 of 2 did not come within 0.3 s"));
}

TEST_CASE("a waiting rank reports the missing ranks, with each backend", "[rendezvous]") {
  LaunchEnvironment environment = rank_of_two(0, free_port());
  environment.launcher = "torchrun";
  environment.run_id = "none/0";
  const std::string text = ddpkit::testing::stderr_of([&] {
    CHECK_THROWS_WITH(
        init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(6), .environment = environment}),
        ContainsSubstring("timed out: rank 1 of 2 did not come"));
  });
  CHECK_THAT(text,
             ContainsSubstring("rank 0 has waited 5 s for rank 1 of 2") && ContainsSubstring("unset RANK WORLD_SIZE"));
}

TEST_CASE("two processes with the same rank are an error", "[rendezvous]") {
  const std::uint16_t port = free_port();
  const auto start = [&](int rank) {
    const pid_t child = ::fork();
    if (child != 0) return child;
    LaunchEnvironment environment = rank_of_two(rank, port);
    environment.world_size = environment.local_world_size = 3;
    try {
      init_process_group({.backend = "shm", .environment = environment});
    } catch (const ddpkit::RendezvousError& error) {
      ::_exit(std::string(error.what()).find("two processes have rank 1") != std::string::npos ? 3 : 1);
    }
    ::_exit(0);
  };
  const pid_t children[] = {start(0), start(1), start(1)};
  int status = 0;
  const pid_t refused = ::waitpid(-1, &status, 0);
  for (const pid_t child : children) {
    if (child == refused) continue;
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
  CHECK(refused != children[0]);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 3);
}

TEST_CASE("a host name that does not resolve is an error", "[rendezvous]") {
  CHECK_THROWS_WITH(
      init_process_group({.backend = "shm", .environment = rank_of_two(1, 29500, "no-such-host.invalid")}),
      ContainsSubstring("MASTER_ADDR \"no-such-host.invalid\" does not resolve"));
}

TEST_CASE("an unknown backend is refused with the known ones", "[rendezvous]") {
  CHECK_THROWS_WITH(init_process_group({.backend = "mpi"}),
                    ContainsSubstring("\"mpi\" is not one of shm, gloo, nccl, hierarchical"));
}

RANK_TEST("ranks can rendezvous repeatedly in one process", "[rendezvous][gloo]", 2, 3) {
  for (int round = 0; round < 20; ++round) {
    // Rank 0 releases a group last in one round, and joins first in the next.
    const auto again = init_process_group({.backend = "shm", .timeout = std::chrono::seconds(60)});
    torch::Tensor sum = torch::full({100}, round + again.rank());
    again.all_reduce(sum);
    CHECK(sum[99].item<int>() == round * again.world_size() + again.world_size() * (again.world_size() - 1) / 2);
    if ((round + again.rank()) % 2 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  // Two groups exist at the same time.
  const auto shm = init_process_group({.backend = "shm", .timeout = std::chrono::seconds(60)});
  const auto gloo = init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(60)});
  for (const auto& member : {group, gloo, shm}) {
    torch::Tensor sum = torch::ones({10});
    member.all_reduce(sum);
    CHECK(sum[9].item<float>() == static_cast<float>(group.world_size()));
  }
}

RANK_TEST("a second group through the same store is refused", "[rendezvous][shm]", 1, 2, 3) {
  // Otherwise it could read where the memory of the first group was.
  CHECK_THROWS_WITH(
      ddpkit::create_shm_backend(group.store(), group.rank(), group.world_size(), std::chrono::seconds(60)),
      ContainsSubstring("rank " + std::to_string(group.rank()) +
                        " has already joined a group through "
                        "this store: pass each group a c10d::PrefixStore"));
  torch::Tensor sum = torch::ones({10});
  ddpkit::testing::another_group(group, "second").all_reduce(sum);
  CHECK(sum[9].item<float>() == static_cast<float>(group.world_size()));
}

RANK_TEST("a child made by fork() may end without its parent's group", "[rendezvous][shm][gloo]", 2) {
  for (const bool shm : {true, false}) {
    CAPTURE(shm);
    std::optional<ddpkit::ProcessGroup> own =
        shm ? ddpkit::testing::another_group(group, "forked")
            : init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(60)});
    // Starts the group's threads.
    std::vector<torch::Tensor> tensors{torch::ones({10})};
    own->backend()->allreduce(tensors)->getFuture()->wait();
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);
      own.reset();
      std::exit(0);  // Runs the destructors of static objects.
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    torch::Tensor sum = torch::ones({10});
    own->all_reduce(sum);
    CHECK(sum[9].item<float>() == 2);
    group.barrier();
  }
}

RANK_TEST("a timeout without end is one", "[rendezvous][shm]", 2) {
  constexpr auto kForever = std::chrono::milliseconds::max();
  const auto patient = init_process_group({.backend = "shm", .timeout = kForever});
  if (patient.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  torch::Tensor sum = torch::ones({10});
  patient.all_reduce(sum);
  CHECK(sum[9].item<float>() == 2);
  std::vector<torch::Tensor> tensors{sum};
  const auto work = patient.backend()->allreduce(tensors);
  if (patient.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  CHECK(work->wait(kForever));
  CHECK_THROWS_WITH(init_process_group({.backend = "shm", .timeout = std::chrono::milliseconds(0)}),
                    "the timeout is 0 ms, but must be positive");
}

TEST_CASE("a world of one needs no network", "[rendezvous]") {
  const auto group = init_process_group({.backend = "shm", .environment = LaunchEnvironment{}});
  CHECK(group.world_size() == 1);
  CHECK(group.rank() == 0);
  at::Tensor tensor = group.allocate({3}, at::kFloat);
  tensor.fill_(2);
  group.all_reduce(tensor);
  CHECK((tensor == 2).all().item<bool>());
  CHECK(group.all_gather_bytes("x") == std::vector<std::string>{"x"});
  group.barrier();
}

TEST_CASE("gloo connects through each interface of GLOO_SOCKET_IFNAME", "[ranks][rendezvous][gloo]") {
  ddpkit::testing::on_ranks("gloo connects through each interface of GLOO_SOCKET_IFNAME", {2},
                            [](ddpkit::ProcessGroup& group) {
                              auto* gloo = dynamic_cast<c10d::ProcessGroupGloo*>(group.backend().get());
                              REQUIRE(gloo);
                              CHECK(gloo->getOptions()->devices.size() == 2);
                              for (int call = 0; call < 4; ++call) {
                                torch::Tensor sum = torch::ones({10});
                                group.all_reduce(sum);
                                CHECK(sum[9].item<float>() == 2);
                              }
                            },
                            {.backend = "gloo", .environment = {{"GLOO_SOCKET_IFNAME", "lo,lo"}}});
}

TEST_CASE("an interface of GLOO_SOCKET_IFNAME that does not exist is named", "[rendezvous][gloo]") {
  ::setenv("GLOO_SOCKET_IFNAME", "lo,none0", 1);
  CHECK_THROWS_WITH(init_process_group({.backend = "gloo", .environment = LaunchEnvironment{}}),
                    ContainsSubstring("names the network interface \"none0\""));
  ::unsetenv("GLOO_SOCKET_IFNAME");
}
