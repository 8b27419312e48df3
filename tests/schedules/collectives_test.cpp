// Collectives under many schedules.
#include <cstring>

#include "explore.h"
#include "support/catch.h"

using namespace ddpkit::schedules;
using ddpkit::shm::CollectiveKind;
using ddpkit::shm::DataType;
using ddpkit::shm::kSlotBytes;
using ddpkit::shm::kSlots;
using ddpkit::shm::PendingHandle;

namespace {

constexpr std::size_t kSlotValues = kSlotBytes / sizeof(std::int64_t);

/// A collective in progress, and its expected result.
struct Call {
  PendingHandle pending;
  Values output, expected;
  Values input = {};
};

/// Starts the collective that `number` selects, with `numel` values per piece.
std::unique_ptr<Call> start(ScenarioRank& rank, CollectiveKind kind, int number, std::size_t numel) {
  auto call = std::make_unique<Call>();
  const auto ranks = static_cast<std::size_t>(rank.ranks);
  const int root = number % rank.ranks;
  const auto self = static_cast<std::size_t>(rank.rank);
  const auto part = [&](int r, std::size_t which) {
    const Values all = ScenarioRank::values(r, number, ranks * numel);
    return Values(all.begin() + static_cast<std::ptrdiff_t>(which * numel),
                  all.begin() + static_cast<std::ptrdiff_t>((which + 1) * numel));
  };
  const auto append = [&](const Values& values) {
    call->expected.insert(call->expected.end(), values.begin(), values.end());
  };
  ddpkit::shm::CollectiveArgs request{.kind = kind, .dtype = DataType::kInt64, .root = root, .numel = numel};
  const bool each_its_own = kind == CollectiveKind::kReduceScatter || kind == CollectiveKind::kAllToAll;
  call->input = ScenarioRank::values(rank.rank, number, each_its_own ? ranks * numel : numel);
  switch (kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduce:
      call->expected = rank.sum(number, numel);
      call->output = call->input;
      if (kind == CollectiveKind::kReduce) request.root = root;
      if (kind == CollectiveKind::kReduce && root != rank.rank) call->expected = call->output;
      break;
    case CollectiveKind::kBroadcast:
      call->expected = ScenarioRank::values(root, number, numel);
      call->output = call->input;
      break;
    case CollectiveKind::kAllGather:
      for (int r = 0; r < rank.ranks; ++r) append(ScenarioRank::values(r, number, numel));
      break;
    case CollectiveKind::kReduceScatter: {
      const Values sum = rank.sum(number, ranks * numel);
      call->expected.assign(sum.begin() + static_cast<std::ptrdiff_t>(self * numel),
                            sum.begin() + static_cast<std::ptrdiff_t>((self + 1) * numel));
      break;
    }
    case CollectiveKind::kAllToAll:
      for (int r = 0; r < rank.ranks; ++r) append(part(r, self));
      request.send_numel = request.receive_numel = std::vector<std::size_t>(ranks, numel);
      break;
    default:
      break;
  }
  call->output.resize(call->expected.size());
  request.input = call->input.data();
  request.output = call->output.data();
  for (std::size_t r = 0; r < ranks; ++r) {
    request.inputs.push_back(call->input.data() + (each_its_own ? r * numel : 0));
    request.outputs.push_back(call->output.data() + (call->output.size() == ranks * numel ? r * numel : 0));
  }
  call->pending = rank.engine->post(std::move(request));
  return call;
}

void finish(ScenarioRank& rank, Call& call) {
  rank.engine->wait(call.pending);
  rank.check(call.output == call.expected, "a collective gave a wrong result");
}

/// The same collective several times; ranks wait for each before the next.
Scenario one_by_one(int ranks, CollectiveKind kind, std::size_t numel, int times, int schedules) {
  return {.ranks = ranks,
          .body =
              [=](ScenarioRank& rank) {
                for (int number = 0; number < times; ++number) finish(rank, *start(rank, kind, number, numel));
              },
          .schedules = schedules};
}

/// `in_flight` collectives of different kinds, all in progress at the same time.
Scenario at_once(int ranks, int in_flight, int schedules) {
  return {.ranks = ranks,
          .body =
              [=](ScenarioRank& rank) {
                constexpr CollectiveKind kKinds[] = {CollectiveKind::kAllReduce,     CollectiveKind::kBroadcast,
                                                     CollectiveKind::kReduceScatter, CollectiveKind::kAllToAll,
                                                     CollectiveKind::kAllGather,     CollectiveKind::kReduce};
                std::vector<std::unique_ptr<Call>> calls;
                for (int round = 0; round < 2; ++round) {
                  for (int i = 0; i < in_flight; ++i)
                    calls.push_back(start(rank, kKinds[(i + round * 3) % 6], round * 10 + i, 5));
                  // Ranks wait in different orders.
                  if (rank.rank % 2 == 1) std::reverse(calls.begin(), calls.end());
                  for (auto& call : calls) finish(rank, *call);
                  calls.clear();
                }
              },
          .schedules = schedules};
}

}  // namespace

TEST_CASE("schedules: every schedule of a barrier with two deviations", "[schedules]") {
  for (const bool membarrier : {true, false}) {
    Scenario scenario = one_by_one(2, CollectiveKind::kBarrier, 0, 1, 0);
    scenario.membarrier = membarrier;
    explore_all(membarrier ? "a barrier" : "a barrier without membarrier(2)", scenario, 2);
  }
}

TEST_CASE("schedules: all-reduces one by one", "[schedules]") {
  explore("2 ranks", one_by_one(2, CollectiveKind::kAllReduce, 5, 3, 4000));
  explore("3 ranks", one_by_one(3, CollectiveKind::kAllReduce, 5, 2, 3000));
}

TEST_CASE("schedules: collectives of different kinds at once", "[schedules]") {
  for (const int ranks : {2, 3}) {
    for (const int in_flight : {2, 4}) {
      explore(std::to_string(ranks) + " ranks, " + std::to_string(in_flight) + " at once",
              at_once(ranks, in_flight, 1000));
    }
  }
}

TEST_CASE("schedules: slots are used again", "[schedules]") {
  for (const int ranks : {2, 3}) {
    explore(std::to_string(ranks) + " ranks",
            {.ranks = ranks,
             .body =
                 [](ScenarioRank& rank) {
                   std::vector<std::unique_ptr<Call>> calls;
                   for (int i = 0; i < static_cast<int>(kSlots) * 2 + 3; ++i)
                     calls.push_back(
                         start(rank, i % 3 == 0 ? CollectiveKind::kAllGather : CollectiveKind::kAllReduce, i, 4));
                   for (auto& call : calls) finish(rank, *call);
                 },
             .schedules = 500});
  }
}

TEST_CASE("schedules: an all-reduce of many chunks", "[schedules]") {
  // Longer than all slots, with a short last chunk. With three ranks, each rank reduces a slice of each chunk.
  explore("2 ranks", one_by_one(2, CollectiveKind::kAllReduce, kSlotValues * kSlots + kSlotValues + 100, 1, 150));
  explore("3 ranks", one_by_one(3, CollectiveKind::kAllReduce, kSlotValues * kSlots + 3000, 1, 100));
}

TEST_CASE("schedules: three ranks share a reduction", "[schedules]") {
  explore("all-reduce", one_by_one(3, CollectiveKind::kAllReduce, 2100, 2, 1000));
  explore("reduce", one_by_one(3, CollectiveKind::kReduce, 2100, 2, 1000));
}

TEST_CASE("schedules: headers are used again", "[schedules]") {
  explore("2 ranks", {.ranks = 2,
                      .body =
                          [](ScenarioRank& rank) {
                            std::vector<std::unique_ptr<Call>> calls;
                            for (int i = 0; i < 70; ++i)
                              calls.push_back(
                                  start(rank, i % 7 == 0 ? CollectiveKind::kAllToAll : CollectiveKind::kBarrier, i, 1));
                            for (auto& call : calls) {
                              if (call->pending->finished || call == calls.back()) rank.engine->wait(call->pending);
                            }
                          },
                      .schedules = 300});
}
