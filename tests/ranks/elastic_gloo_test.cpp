// Elastic groups on gloo, whose collectives may complete on some ranks only.
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/error.h>

#include "comm/agreement.h"
#include "comm/shm_rendezvous.h"
#include "ranks/elastic_loss.h"
#include "support/catch.h"
#include "support/ranks.h"

namespace {

using ddpkit::InvalidArgument, ddpkit::PeerLost, ddpkit::ProcessGroup, ddpkit::Timeout;
using ddpkit::testing::die;
using ddpkit::testing::on_ranks;
using std::chrono::milliseconds;

ProcessGroup elastic_gloo(milliseconds timeout = std::chrono::seconds(60)) {
  return ddpkit::init_process_group({.backend = "gloo", .timeout = timeout, .elastic = true});
}

/// A file that all ranks of a test see.
std::filesystem::path shared_file(const std::string& name) {
  return std::filesystem::path(std::getenv("DDPKIT_TEST_FOLDER")) / name;
}

/// Calls collectives in the time in which another rank ends, and returns the number of complete ones.
int broadcast_until_lost(const ProcessGroup& group, std::int64_t numel) {
  int complete = 0;
  try {
    for (;; ++complete) {
      torch::Tensor tensor = torch::full({numel}, group.rank());
      group.broadcast(tensor, 0);
    }
  } catch (const PeerLost&) {
    return complete;
  }
}

}  // namespace

RANK_TEST("an elastic gloo collective completes on no rank before all have called it", "[elastic]", 3) {
  const ProcessGroup elastic = elastic_gloo();
  const torch::Tensor second = torch::full({3}, group.rank() + 1), first = second.clone();
  for (const bool polls : {false, true}) {
    const auto called = shared_file(polls ? "called again" : "called");
    first.fill_(group.rank() + 1);
    second.fill_(group.rank() + 1);
    if (group.rank() == 2) {
      std::this_thread::sleep_for(milliseconds(300));
      std::ofstream(called) << "yes";
    }
    // gloo completes the broadcast on rank 1 without rank 2.
    ddpkit::Work one = elastic.broadcast_async(first, 0), two = elastic.all_reduce_async(second);
    while (polls && !one.is_completed()) std::this_thread::sleep_for(milliseconds(1));
    if (!polls) one.wait();
    CHECK(std::filesystem::exists(called));
    two.wait();
    one.wait();
    CHECK(first.eq(1).all().item<bool>());
    CHECK(second.eq(6).all().item<bool>());
  }
  // A rank need not wait for a collective before it calls the next one.
  for (int i = 0; i < 100; ++i) {
    ddpkit::Work work = elastic.all_reduce_async(first);
    if (i % 10 == group.rank()) work.wait();
  }
  CHECK(elastic.shutdown());
}

TEST_CASE("the survivors of a death have completed the same gloo collectives", "[ranks][elastic]") {
  for (int round = 0; round < 8; ++round) {
    CAPTURE(round);
    on_ranks("the survivors of a death have completed the same gloo collectives", 3,
             [&](ProcessGroup& group) {
               const ProcessGroup elastic = elastic_gloo();
               const int victim = round % 3;
               std::thread killer;
               elastic.barrier();
               if (group.rank() == victim)
                 killer = std::thread([=] {
                   std::this_thread::sleep_for(std::chrono::microseconds(2000 + 700 * round));
                   die();
                 });
               // Some deaths happen within a transfer.
               const int complete = broadcast_until_lost(elastic, round % 2 == 0 ? 3 : 4 << 20);
               CHECK(elastic.shrink().lost == std::vector<int>{victim});
               torch::Tensor counts = torch::tensor({complete, -complete});
               elastic.all_reduce(counts, ddpkit::ReduceOp::kMax);
               CHECK(counts[0].item<int>() == -counts[1].item<int>());
             },
             {.doomed = {round % 3}});
  }
}

TEST_CASE("a second rank ends while the others connect through gloo again", "[ranks][elastic]") {
  for (int round = 0; round < 12; ++round) {
    CAPTURE(round);
    const int second = round % 2 == 0 ? 0 : 2;  // Rank 0 serves the new store.
    on_ranks("a second rank ends while the others connect through gloo again", 4,
             [&](ProcessGroup& group) {
               const ProcessGroup elastic = elastic_gloo();
               const int first_rank = group.rank();
               if (first_rank == 3) die();
               CHECK_THROWS_AS(elastic.barrier(), PeerLost);
               std::thread killer;
               if (first_rank == second)
                 killer = std::thread([=] {
                   std::this_thread::sleep_for(milliseconds(round));
                   die();
                 });
               std::vector<int> left = elastic.shrink().old_rank_of;
               while (left.size() > 2) {
                 try {
                   elastic.barrier();
                 } catch (const PeerLost&) {
                   left.resize(elastic.shrink().old_rank_of.size());
                 }
               }
               torch::Tensor sum = torch::full({1000}, 1 << first_rank);
               elastic.all_reduce(sum);
               CHECK(sum.eq((1 << 0) + (1 << 1) + (1 << 2) - (1 << second)).all().item<bool>());
             },
             {.doomed = {3, second}});
  }
}

RANK_TEST("a rank that leaves an elastic gloo group is lost", "[elastic]", 3) {
  {
    const ProcessGroup elastic = elastic_gloo();
    elastic.barrier();
    if (group.rank() != 0) {
      CHECK_THROWS_AS(elastic.all_reduce(torch::ones({5})), PeerLost);
      CHECK(elastic.shrink().lost == std::vector<int>{0});
      torch::Tensor ones = torch::ones({5});
      elastic.all_reduce(ones);
      CHECK(ones.eq(2).all().item<bool>());
    }
  }
  group.barrier();
}

TEST_CASE("an error of an elastic group comes after the end of its calls", "[elastic]") {
  // As a backend whose threads still write to tensors after the failure.
  std::atomic<bool> aborted = false, ended = false;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ddpkit::GroupGuard guard(store, {}, std::chrono::seconds(60), /*name=*/0);
  guard.start({.abort = [&] { aborted = true; }});
  ddpkit::Agreement agreement(ddpkit::connect_engine(store, 0, 1, std::chrono::seconds(60), /*first_rank=*/0), guard);
  guard.watch(0, {}, [&] { return ended.load(); });
  std::thread backend([&] {
    while (!aborted) std::this_thread::sleep_for(milliseconds(1));
    std::this_thread::sleep_for(milliseconds(100));
    ended = true;
  });
  guard.fail({.kind = ddpkit::FailureKind::kPeerLost, .failed_rank = 1, .text = "rank 1 has ended"});
  CHECK_THROWS_AS(agreement.check(), PeerLost);
  CHECK(ended);
  backend.join();
}

TEST_CASE("an elastic group does not use the result of an aborted call", "[elastic]") {
  // On a device, an aborted collective ends like a complete one.
  class DeviceWork final : public c10d::Work {
    bool wait(milliseconds /*timeout*/) override { return true; }
    bool isCompleted() override { return true; }
  };
  for (const bool polls : {false, true}) {
    std::atomic<bool> aborted = false;
    const auto store = c10::make_intrusive<c10d::HashStore>();
    ddpkit::GroupGuard guard(store, {}, std::chrono::seconds(60), /*name=*/0);
    guard.start({.abort = [&] { aborted = true; }});
    ddpkit::Agreement agreement(ddpkit::connect_engine(store, 0, 1, std::chrono::seconds(60), /*first_rank=*/0), guard);
    const auto number = agreement.add(c10::make_intrusive<DeviceWork>(), [&] { return aborted.load(); });
    std::thread failing([&] {
      std::this_thread::sleep_for(milliseconds(50));
      guard.fail({.kind = ddpkit::FailureKind::kPeerLost, .failed_rank = 1, .text = "rank 1 has ended"});
    });
    if (polls) {
      while (!aborted) std::this_thread::sleep_for(milliseconds(1));
      CHECK(agreement.test(number));
    }
    CHECK_THROWS_AS(agreement.wait(number), PeerLost);
    failing.join();
  }
}

TEST_CASE("a wait for a key of the store of the remaining ranks ends when a rank ends", "[ranks][elastic]") {
  on_ranks("a wait for a key of the store of the remaining ranks ends when a rank ends", 3,
           [](ProcessGroup& group) {
             const auto store = c10::make_intrusive<c10d::PrefixStore>("engine", group.store());
             const auto engine =
                 ddpkit::connect_engine(store, group.rank(), 3, std::chrono::seconds(60), /*first_rank=*/0);
             engine->set_elastic();
             const auto remaining = ddpkit::connect_remaining(engine);
             remaining.store->set("from " + std::to_string(group.rank()), "here");
             for (int r = 0; r < 3; ++r) CHECK(remaining.store->get_to_str("from " + std::to_string(r)) == "here");
             remaining.store->set("has read " + std::to_string(group.rank()), "all");
             if (group.rank() == 1) {
               remaining.store->wait({"has read 0", "has read 2"});
               die();
             }
             CHECK_THROWS_AS(remaining.store->get("nobody sets it"), PeerLost);
             CHECK_THROWS_AS(remaining.store->check({"from 0"}), PeerLost);
             std::vector<int> members;
             CHECK(engine->shrink(1, members)->world_size() == 2);
             CHECK(members == std::vector<int>{0, 2});
           },
           {.doomed = {1}});
}

RANK_TEST("a silent rank of an elastic gloo group is a timeout, not a loss", "[elastic]", 3) {
  const ProcessGroup elastic = elastic_gloo(std::chrono::seconds(1));
  if (group.rank() != 1) {
    try {
      elastic.all_reduce(torch::ones({5}));
      FAIL("an all-reduce without rank 1");
    } catch (const Timeout& error) {
      CHECK(error.context().rank == 1);
    }
    CHECK_THROWS_AS(elastic.shrink(), InvalidArgument);
  }
  group.barrier();
  CHECK_THROWS_AS(elastic.barrier(), Timeout);
}
