#include <ddpkit/comm/error.h>
#include <ddpkit/comm/process_group.h>

#include "support/catch.h"
#include "support/port.h"

using ddpkit::init_process_group;
using ddpkit::LaunchEnvironment;
using ddpkit::testing::TakenPort;

namespace {

/// A port that nobody listens on.
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
      ContainsSubstring("rank 1 of 2 did not come within 0.3 s"));
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
