// Collectives in symmetric memory under many schedules.
#include <cstring>

#include "explore.h"
#include "support/catch.h"

using namespace ddpkit::schedules;
using ddpkit::shm::CoalescedTensor;
using ddpkit::shm::CollectiveKind;
using ddpkit::shm::DataType;
using ddpkit::shm::PendingHandle;

namespace {

constexpr std::size_t kPart = 600;  ///< Values of a tensor: large enough to be read in place.
constexpr std::size_t kPartBytes = kPart * sizeof(std::int64_t);

/// Returns tensor `index` of this rank's segment.
std::byte* tensor(const ScenarioRank& rank, std::size_t index) {
  return rank.segment->base[static_cast<std::size_t>(rank.rank)] + index * kPartBytes;
}

void put(const ScenarioRank& rank, std::size_t index, const Values& values) {
  std::memcpy(tensor(rank, index), values.data(), values.size() * sizeof(std::int64_t));
}

void check(ScenarioRank& rank, std::size_t index, const Values& expected) {
  Values values(expected.size());
  std::memcpy(values.data(), tensor(rank, index), values.size() * sizeof(std::int64_t));
  rank.check(values == expected, "a collective in symmetric memory gave a wrong result");
}

PendingHandle all_reduce(ScenarioRank& rank, std::size_t index) {
  return rank.engine->post({.kind = CollectiveKind::kAllReduce,
                            .dtype = DataType::kInt64,
                            .input = tensor(rank, index),
                            .output = tensor(rank, index),
                            .numel = kPart});
}

}  // namespace

TEST_CASE("schedules: all-reduces in symmetric memory, one of them staged by a rank with private memory",
          "[schedules]") {
  for (const int ranks : {2, 3}) {
    explore(std::to_string(ranks) + " ranks",
            {.ranks = ranks,
             .body =
                 [](ScenarioRank& rank) {
                   std::vector<PendingHandle> pending;
                   for (std::size_t i = 0; i < 3; ++i)
                     put(rank, i, ScenarioRank::values(rank.rank, static_cast<int>(i), kPart));
                   Values own = ScenarioRank::values(rank.rank, 1, kPart);
                   pending.push_back(all_reduce(rank, 0));
                   pending.push_back(rank.rank != 1 ? all_reduce(rank, 1)
                                                    : rank.engine->post({.kind = CollectiveKind::kAllReduce,
                                                                         .dtype = DataType::kInt64,
                                                                         .input = own.data(),
                                                                         .output = own.data(),
                                                                         .numel = kPart}));
                   pending.push_back(all_reduce(rank, 2));
                   for (const auto& each : pending) rank.engine->wait(each);
                   check(rank, 0, rank.sum(0, kPart));
                   if (rank.rank != 1) check(rank, 1, rank.sum(1, kPart));
                   check(rank, 2, rank.sum(2, kPart));
                   // The call has finished on all ranks, so the memory can be reused.
                   put(rank, 0, ScenarioRank::values(rank.rank, 9, kPart));
                   rank.engine->wait(all_reduce(rank, 0));
                   check(rank, 0, rank.sum(9, kPart));
                 },
             .schedules = 700,
             .symmetric = 3 * kPartBytes});
  }
}

TEST_CASE("schedules: coalesced collectives, broadcast and all-gather in symmetric memory", "[schedules]") {
  for (const int ranks : {2, 3}) {
    explore(std::to_string(ranks) + " ranks",
            {.ranks = ranks,
             .body =
                 [](ScenarioRank& rank) {
                   for (std::size_t i = 0; i < 2; ++i)
                     put(rank, i, ScenarioRank::values(rank.rank, static_cast<int>(i), kPart));
                   put(rank, 2, ScenarioRank::values(rank.rank, 2, kPart));
                   put(rank, 3, ScenarioRank::values(rank.rank, 3, kPart));
                   std::vector<CoalescedTensor> tensors(2);
                   for (std::size_t i = 0; i < 2; ++i) tensors[i] = {.data = tensor(rank, i), .numel = kPart - i};
                   const auto reduced = rank.engine->post({.kind = CollectiveKind::kAllReduceCoalesced,
                                                           .dtype = DataType::kInt64,
                                                           .numel = 2 * kPart - 1,
                                                           .tensors = tensors});
                   const auto sent = rank.engine->post({.kind = CollectiveKind::kBroadcast,
                                                        .dtype = DataType::kInt64,
                                                        .root = 1,
                                                        .input = tensor(rank, 2),
                                                        .output = tensor(rank, 2),
                                                        .numel = kPart});
                   std::vector<Values> all(static_cast<std::size_t>(rank.ranks), Values(kPart));
                   std::vector<void*> outputs;
                   for (Values& values : all) outputs.push_back(values.data());
                   const auto gathered = rank.engine->post({.kind = CollectiveKind::kAllGather,
                                                            .dtype = DataType::kInt64,
                                                            .input = tensor(rank, 3),
                                                            .numel = kPart,
                                                            .outputs = outputs});
                   rank.engine->wait(gathered);
                   rank.engine->wait(reduced);
                   rank.engine->wait(sent);
                   check(rank, 0, rank.sum(0, kPart));
                   check(rank, 1, rank.sum(1, kPart - 1));
                   check(rank, 2, ScenarioRank::values(1, 2, kPart));
                   for (int r = 0; r < rank.ranks; ++r)
                     rank.check(all[static_cast<std::size_t>(r)] == ScenarioRank::values(r, 3, kPart),
                                "an all-gather gave a wrong result");
                 },
             .schedules = 700,
             .symmetric = 4 * kPartBytes});
  }
}
