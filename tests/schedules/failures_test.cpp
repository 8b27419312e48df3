// Ranks that die, leave, abort, disagree or are late, under many schedules.
#include <atomic>

#include <ddpkit/error.h>

#include "explore.h"
#include "support/catch.h"

using namespace ddpkit::schedules;
using ddpkit::CollectiveMismatch;
using ddpkit::PeerLost;
using ddpkit::Timeout;
using ddpkit::shm::CollectiveKind;
using ddpkit::shm::DataType;
using ddpkit::shm::kMaxOutstanding;
using ddpkit::shm::last_header;
using ddpkit::shm::Message;
using ddpkit::shm::PendingHandle;
using ddpkit::shm::RankBlock;

namespace {

/// Runs several all-reduces at the same time.
void reduce_some(ScenarioRank& rank, int times, std::size_t numel) {
  std::vector<Values> data;
  std::vector<PendingHandle> pending;
  for (int i = 0; i < times; ++i) data.push_back(ScenarioRank::values(rank.rank, i, numel));
  for (Values& values : data) {
    pending.push_back(rank.engine->post({.kind = CollectiveKind::kAllReduce,
                                         .dtype = DataType::kInt64,
                                         .input = values.data(),
                                         .output = values.data(),
                                         .numel = numel}));
  }
  for (int i = 0; i < times; ++i) {
    rank.engine->wait(pending[static_cast<std::size_t>(i)]);
    rank.check(data[static_cast<std::size_t>(i)] == rank.sum(i, numel), "a collective gave a wrong result");
  }
}

/// Like reduce_some(). Returns the number of collectives that have completed before a rank was lost, also if another
/// call threw before their wait.
int reduce_elastic(ScenarioRank& rank, int times, std::size_t numel) {
  std::vector<Values> data;
  std::vector<PendingHandle> pending;
  for (int i = 0; i < times; ++i) data.push_back(ScenarioRank::values(rank.rank, i, numel));
  try {
    for (Values& values : data)
      pending.push_back(rank.engine->post({.kind = CollectiveKind::kAllReduce,
                                           .dtype = DataType::kInt64,
                                           .input = values.data(),
                                           .output = values.data(),
                                           .numel = numel}));
    for (const PendingHandle& each : pending) rank.engine->wait(each);
  } catch (const PeerLost&) {
  }
  int completed = 0;
  for (; completed < std::ssize(pending) && pending[static_cast<std::size_t>(completed)]->finished; ++completed)
    rank.check(data[static_cast<std::size_t>(completed)] == rank.sum(completed, numel), "a wrong result");
  return completed;
}

/// Checks that all ranks of `rest` have completed as many collectives.
void check_alike(ScenarioRank& rank, ddpkit::shm::Engine& rest, std::int64_t completed) {
  Values sums{1, completed, completed * completed};
  rest.run({.kind = CollectiveKind::kAllReduce,
            .dtype = DataType::kInt64,
            .input = sums.data(),
            .output = sums.data(),
            .numel = sums.size()});
  rank.check(sums[0] == rest.world_size(), "a wrong sum");
  // The variance of equal numbers is 0.
  rank.check(sums[0] * sums[2] == sums[1] * sums[1], "survivors have completed different collectives");
}

/// The last rank ends its group by `end` after one collective. The other ranks must learn this before their futex wait
/// times out.
Scenario ends_by(int ranks, const std::function<void(ScenarioRank&)>& end, const std::string& message) {
  return {.ranks = ranks,
          .body =
              [=](ScenarioRank& rank) {
                if (rank.rank == ranks - 1) {
                  reduce_some(rank, 1, 3);
                  return end(rank);
                }
                try {
                  // A rank that learns of the end before its first result fails in the first call.
                  reduce_some(rank, 1, 3);
                  rank.engine->run({.kind = CollectiveKind::kBarrier});
                  rank.check(false, "a barrier without the last rank");
                } catch (const PeerLost& error) {
                  rank.check(error.context().rank == ranks - 1, std::string("another rank is named: ") + error.what());
                  rank.check(std::string(error.what()).find(message) != std::string::npos, error.what());
                  rank.engine.reset();  // The others must not blame a survivor that leaves.
                }
              },
          .schedules = 2000};
}

Scenario leaves(int ranks) {
  return ends_by(
      ranks, [](ScenarioRank& rank) { rank.engine.reset(); }, "has left the group");
}

Scenario aborts(int ranks) {
  return ends_by(
      ranks, [](ScenarioRank& rank) { rank.engine->abort("NaN"); },
      "rank " + std::to_string(ranks - 1) + " aborted: NaN");
}

}  // namespace

TEST_CASE("schedules: a rank dies at each point of its collectives", "[schedules]") {
  const auto scenario = [](int ranks, std::size_t numel, int schedules) {
    return Scenario{
        .ranks = ranks, .body = [=](ScenarioRank& rank) { reduce_some(rank, 3, numel); }, .schedules = schedules};
  };
  explore_deaths("2 ranks", scenario(2, 5, 3000), 1);
  explore_deaths("3 ranks", scenario(3, 5, 3000), 0);
  explore_deaths("3 ranks that share a reduction", scenario(3, 2100, 2000), 2);
}

TEST_CASE("schedules: the survivors of a death have completed the same collectives, and continue", "[schedules]") {
  const auto scenario = [](int ranks, std::size_t numel, int schedules) {
    return Scenario{.ranks = ranks,
                    .body =
                        [=](ScenarioRank& rank) {
                          rank.engine->set_elastic();
                          const int completed = reduce_elastic(rank, 3, numel);
                          if (completed == 3) return rank.engine.reset();
                          std::vector<int> members;
                          const auto rest = rank.engine->shrink(1, members);
                          rank.check(std::ssize(members) == ranks - 1, "a survivor is missing");
                          check_alike(rank, *rest, completed);
                        },
                    .schedules = schedules};
  };
  explore_deaths("2 ranks", scenario(2, 5, 1000), 1);
  explore_deaths("3 ranks", scenario(3, 5, 3000), 1);
  explore_deaths("3 ranks that share a reduction", scenario(3, 2100, 2000), 2);
}

TEST_CASE("schedules: a rank dies while the others continue without a lost rank", "[schedules]") {
  const auto body_of = [](int ranks) {
    return [=](ScenarioRank& rank) {
      rank.engine->set_elastic();
      if (rank.rank == ranks - 1) return rank.engine.reset();
      const int completed = reduce_elastic(rank, 1, 2);
      std::vector<int> members;
      for (auto* engine = rank.engine.get();;) {
        auto rest = engine->shrink(1, members);
        try {
          return check_alike(rank, *rest, completed);
        } catch (const PeerLost&) {
          rank.engine = std::move(rest);
          engine = rank.engine.get();
        }
      }
    };
  };
  explore_deaths("the rank that offers", {.ranks = 3, .body = body_of(3), .schedules = 3000}, 0);
  explore_deaths("another rank", {.ranks = 3, .body = body_of(3), .schedules = 3000}, 1);
  explore_deaths("the rank that offers to two", {.ranks = 4, .body = body_of(4), .schedules = 2000}, 0);
}

TEST_CASE("schedules: a rank stops because of a failure elsewhere, and the others stop after the same collective",
          "[schedules]") {
  const auto body = [](ScenarioRank& rank) {
    bool was_notified = false;
    rank.engine->set_elastic([&](ddpkit::FailureKind, const std::string&, std::optional<int>) { was_notified = true; });
    int completed = 0;
    try {
      for (; completed < 3; ++completed) {
        if (rank.rank == 0 && completed == 1) rank.engine->stop(ddpkit::FailureKind::kPeerLost, "elsewhere", 2);
        rank.engine->run({.kind = CollectiveKind::kBarrier, .recorded = false});
      }
      rank.check(false, "barriers without rank 0");
    } catch (const PeerLost&) {
    }
    rank.check(was_notified, "a failure without a notification");
    std::vector<int> members;
    check_alike(rank, *rank.engine->shrink(1, members), completed);
  };
  explore("nobody dies", {.ranks = 3, .body = body, .schedules = 2000});
  explore_deaths("rank 2 dies", {.ranks = 3, .body = body, .schedules = 2000}, 2);
}

TEST_CASE("schedules: a rank dies at each point of the rendezvous", "[schedules]") {
  explore_deaths("3 ranks",
                 {.ranks = 3,
                  .body = [](ScenarioRank& rank) { reduce_some(rank, 1, 2); },
                  .schedules = 1500,
                  .explores_join = true},
                 1);
}

TEST_CASE("schedules: the rendezvous", "[schedules]") {
  for (const int ranks : {2, 3}) {
    explore(std::to_string(ranks) + " ranks", {.ranks = ranks,
                                               .body = [](ScenarioRank& rank) { reduce_some(rank, 1, 3); },
                                               .schedules = 1000,
                                               .explores_join = true});
  }
}

TEST_CASE("schedules: a rank leaves", "[schedules]") {
  explore("3 ranks", leaves(3));
  explore_all("2 ranks", leaves(2), 2);
}

TEST_CASE("schedules: a rank aborts", "[schedules]") {
  explore("3 ranks", aborts(3));
  explore_all("2 ranks", aborts(2), 2);
}

TEST_CASE("schedules: a survivor that leaves after an abort is not blamed", "[schedules]") {
  const auto body = [](ScenarioRank& rank) {
    if (rank.rank == 2) return rank.engine->abort("NaN");
    try {
      Values values(1);
      if (rank.rank == 0) rank.engine->run({.kind = CollectiveKind::kBarrier});
      if (rank.rank == 1) rank.engine->wait(rank.engine->post(message(Message::Kind::kReceive, 2, 0, values)));
      rank.check(false, "a call without rank 2");
    } catch (const PeerLost& error) {
      rank.check(error.context().rank == 2, std::string("another rank is named: ") + error.what());
      rank.engine.reset();
    }
  };
  explore_all("3 ranks", {.ranks = 3, .body = body}, 2);
}

TEST_CASE("schedules: a rank's last call is read whole while it continues to call", "[schedules]") {
  explore("2 ranks", {.body =
                          [](ScenarioRank& rank) {
                            auto* block = reinterpret_cast<RankBlock*>(rank.segment->base[0]);
                            const auto post = [&](std::uint64_t sequence) {
                              ddpkit::shm::CollectiveHeader header{};
                              header.sequence = sequence;
                              header.numel = 3 * sequence;
                              header.tensor_sizes = ~sequence;
                              block->headers[sequence % kMaxOutstanding].store(header);
                              block->progress.posted.store(sequence + 1, std::memory_order_release);
                            };
                            if (rank.rank == 0) {
                              new (block) RankBlock;
                              post(0);
                            }
                            rank.engine->run({.kind = CollectiveKind::kBarrier});
                            for (std::uint64_t i = 1; rank.rank == 0 && i < 2 * kMaxOutstanding; ++i) post(i);
                            for (int i = 0; rank.rank == 1 && i < 10; ++i) {
                              const auto header = last_header(*block);
                              if (!header) continue;
                              const std::uint64_t sequence = header->sequence;
                              rank.check(header->numel == 3 * sequence && header->tensor_sizes == ~sequence,
                                         "a header has parts of two");
                            }
                          },
                      .schedules = 300,
                      .symmetric = sizeof(RankBlock)});
}

TEST_CASE("schedules: ranks that call different collectives all learn it", "[schedules]") {
  explore("3 ranks", {.ranks = 3,
                      .body =
                          [](ScenarioRank& rank) {
                            reduce_some(rank, 1, 3);
                            Values values(4);
                            try {
                              rank.engine->run({.kind = CollectiveKind::kBroadcast,
                                                .dtype = DataType::kInt64,
                                                .root = rank.rank == 1 ? 1 : 0,
                                                .input = values.data(),
                                                .output = values.data(),
                                                .numel = 4});
                              rank.check(false, "broadcasts from different ranks");
                            } catch (const CollectiveMismatch& error) {
                              rank.check(error.context().rank == 1, error.what());
                            }
                          },
                      .schedules = 2000});
}

TEST_CASE("schedules: a late rank is named when the timeout ends", "[schedules]") {
  explore("2 ranks", {.body =
                          [](ScenarioRank& rank) {
                            reduce_some(rank, 1, 3);
                            if (rank.rank == 1) return;
                            try {
                              rank.engine->run({.kind = CollectiveKind::kBarrier});
                              rank.check(false, "a barrier without rank 1");
                            } catch (const Timeout& error) {
                              rank.check(error.context().rank == 1, error.what());
                            }
                          },
                      .schedules = 500,
                      .naps_expire = true,
                      .timeout = std::chrono::milliseconds(200)});
}

TEST_CASE("schedules: a rank that makes no progress is named, not the ranks that wait for it", "[schedules]") {
  explore("3 ranks", {.ranks = 3,
                      .body =
                          [](ScenarioRank& rank) {
                            const auto post_barriers = [&] {
                              PendingHandle last;
                              for (std::uint64_t i = 0; i < ddpkit::shm::kSlots + 2; ++i)
                                last = rank.engine->post({.kind = CollectiveKind::kBarrier});
                              return last;
                            };
                            // The others start after the last progress of rank 2.
                            auto& has_stopped = *reinterpret_cast<std::atomic<std::uint64_t>*>(rank.segment->base[2]);
                            if (rank.rank == 2) {
                              post_barriers();
                              has_stopped.store(1);
                              return;
                            }
                            while (has_stopped.load() == 0) rank.simulation.sleep(1000);
                            try {
                              rank.engine->wait(post_barriers());
                              rank.check(false, "more barriers than slots without rank 2");
                            } catch (const Timeout& error) {
                              rank.check(error.context().rank == 2, error.what());
                              rank.check(std::string(error.what()).find("waiting for rank 2:") != std::string::npos,
                                         error.what());
                            }
                          },
                      .schedules = 200,
                      .symmetric = sizeof(std::atomic<std::uint64_t>),
                      .naps_expire = true,
                      .timeout = std::chrono::milliseconds(200)});
}
