// Many collectives of random kinds, types, sizes, groups and timing, compared with the expected results.
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <numeric>
#include <optional>
#include <random>
#include <thread>

#include "support/catch.h"
#include "support/drawn.h"
#include "support/ranks.h"
#include "support/seed.h"

using ddpkit::ProcessGroup;
using ddpkit::ReduceOp;
using ddpkit::Work;
using ddpkit::testing::drawn;
using ddpkit::testing::reduced;
using ddpkit::testing::same;
using ddpkit::testing::seed_of_this_run;

namespace {

struct Group {
  ProcessGroup group;
  std::vector<int> members;  ///< Ranks of the whole job. [rank]
  torch::Tensor symmetric;   ///< Memory of the tensors, in bytes.
};

/// A collective in progress, and its expected result.
struct Expected {
  Work work;
  torch::Tensor actual, expected;
  std::string what;
};

class RandomRun {
 public:
  RandomRun(std::vector<Group> groups, int rank, std::uint64_t seed)
      : groups_(std::move(groups)),
        rank_(rank),
        seed_(seed),
        shared_(seed),
        own_(seed * 31 + static_cast<std::uint64_t>(rank)) {}

  void run(int collectives) {
    for (int number = 0; number < collectives; ++number) {
      start(static_cast<std::uint64_t>(number));
      // Each rank waits at different times, with at most 40 collectives in progress.
      while (!pending_.empty() && (pending_.size() > 40 || own_() % 3 == 0)) finish_one();
      if (own_() % 500 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own_() % 3000));
    }
    while (!pending_.empty()) finish_one();
  }
  int checked() const { return checked_; }

 private:
  /// Returns the input of rank `rank` (of the whole job) for collective `number`.
  torch::Tensor data_of(std::uint64_t number, int rank, std::int64_t numel, at::ScalarType dtype) const {
    std::seed_seq words{seed_ & 0xffffffff, seed_ >> 32, number, static_cast<std::uint64_t>(rank)};
    std::mt19937_64 random(words);
    return drawn(dtype, numel, random);
  }

  // Every rank draws, also ranks that do not take part, so that all draws are equal.
  std::uint64_t draw(std::uint64_t below) { return shared_() % below; }

  void start(std::uint64_t number) {
    const std::size_t which = draw(groups_.size());
    const std::uint64_t kind = draw(9);
    constexpr at::ScalarType kTypes[] = {at::kByte, at::kChar,  at::kShort,  at::kInt,      at::kLong,
                                         at::kHalf, at::kFloat, at::kDouble, at::kBFloat16, at::kBool};
    const at::ScalarType dtype = kTypes[draw(10)];
    constexpr std::int64_t kScales[] = {1, 10, 100, 1000, 1000, 10000, 100000};
    const auto numel = static_cast<std::int64_t>(draw(static_cast<std::uint64_t>(kScales[draw(7)]) + 1));
    const bool symmetric = draw(3) == 0;
    const std::uint64_t root_draw = draw(1000);
    constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMin,  ReduceOp::kMax, ReduceOp::kProduct,
                                 ReduceOp::kAvg, ReduceOp::kBand, ReduceOp::kBor, ReduceOp::kBxor};
    std::uint64_t which_op = draw(at::isFloatingType(dtype) ? 5 : dtype == at::kBool ? 7 : 8);
    if (dtype == at::kBool && which_op >= 4) ++which_op;  // Booleans have no mean.
    const ReduceOp op = kOps[which_op];
    const std::uint64_t mixed = draw(20);
    const Group& target = groups_[which];
    const auto own = std::find(target.members.begin(), target.members.end(), rank_);
    if (own == target.members.end()) return;
    const auto ranks = static_cast<std::int64_t>(target.members.size());
    const int me = static_cast<int>(own - target.members.begin());
    const int root = static_cast<int>(root_draw % target.members.size());
    const auto everybody = [&](std::int64_t count) {
      std::vector<torch::Tensor> parts;
      for (const int member : target.members) parts.push_back(data_of(number, member, count, dtype));
      return parts;
    };
    const auto row = [&](const torch::Tensor& rows, int index) { return rows.view({ranks, numel})[index]; };
    const ProcessGroup& group = target.group;
    const std::string what = "collective " + std::to_string(number) + ", kind " + std::to_string(kind) + ", " +
                             std::to_string(numel) + " of " + c10::toString(dtype) + " in group " +
                             std::to_string(which);
    // The same values in the group's symmetric memory. Sometimes only one rank uses private memory.
    bool in_symmetric = false;
    const auto placed = [&](const torch::Tensor& values) {
      in_symmetric = symmetric;
      if (!symmetric || (mixed == 0 && me == 0)) return values;
      const auto bytes = static_cast<std::int64_t>(values.nbytes());
      return target.symmetric.narrow(0, 0, bytes).view(dtype).copy_(values);
    };
    torch::Tensor actual, expected;
    Work work;
    switch (kind) {
      case 0:
      case 1:
      case 2:
        actual = placed(data_of(number, rank_, numel, dtype));
        expected = reduced(everybody(numel), op);
        work = group.all_reduce_async(actual, op);
        break;
      case 3:
        actual = placed(data_of(number, rank_, numel, dtype));
        expected = data_of(number, target.members[static_cast<std::size_t>(root)], numel, dtype);
        work = group.broadcast_async(actual, root);
        break;
      case 4:
        actual = torch::empty({ranks * numel}, dtype);
        expected = torch::cat(everybody(numel));
        work = group.all_gather_into_async(actual, placed(data_of(number, rank_, numel, dtype)));
        break;
      case 5:
        actual = torch::empty({numel}, dtype);
        expected = row(reduced(everybody(ranks * numel), op), me);
        work = group.reduce_scatter_async(actual, placed(data_of(number, rank_, ranks * numel, dtype)), op);
        break;
      case 6: {
        actual = torch::empty({ranks * numel}, dtype);
        std::vector<torch::Tensor> rows;
        for (const auto& part : everybody(ranks * numel)) rows.push_back(row(part, me));
        expected = torch::cat(rows);
        group.all_to_all(actual.view({ranks, numel}),
                         data_of(number, rank_, ranks * numel, dtype).view({ranks, numel}));
        break;
      }
      case 7: {
        actual = data_of(number, rank_, numel, dtype);
        expected = me == root ? reduced(everybody(numel), op) : actual.clone();
        group.reduce(actual, root, op);
        break;
      }
      default: {
        // A ring of messages.
        actual = torch::empty({numel}, dtype);
        const int next = (me + 1) % static_cast<int>(ranks),
                  before = (me + static_cast<int>(ranks) - 1) % static_cast<int>(ranks);
        expected = data_of(number, target.members[static_cast<std::size_t>(before)], numel, dtype);
        (void)group.send_async(data_of(number, rank_, numel, dtype), next, static_cast<int>(number % 3));
        group.recv(actual, before, static_cast<int>(number % 3));
        break;
      }
    }
    pending_.push_back({work, actual, expected, what});
    // The memory is used again only after the collective has finished on all ranks.
    while (in_symmetric && !pending_.empty()) finish_one();
  }

  void finish_one() {
    Expected& oldest = pending_.front();
    oldest.work.wait();
    ++checked_;
    if (!same(oldest.actual, oldest.expected)) FAIL("wrong result of " << oldest.what);
    pending_.pop_front();
  }

  std::vector<Group> groups_;
  int rank_;
  std::uint64_t seed_;
  std::mt19937_64 shared_, own_;
  std::deque<Expected> pending_;
  int checked_ = 0;
};

}  // namespace

RANK_TEST("random collectives", "[shm][random]", 2, 3, 4) {
  // All ranks use rank 0's seed.
  torch::Tensor drawn_seed = torch::zeros({1}, at::kLong);
  if (group.rank() == 0) drawn_seed[0] = static_cast<std::int64_t>(seed_of_this_run());
  group.broadcast(drawn_seed);
  const int collectives = group.world_size() == 4 ? 4000 : 1500;
  std::vector<Group> groups;
  // The members of each group, in group order. Worlds below 4 have only some of the groups.
  const std::vector<std::vector<int>> kMembers = {{0, 1}, {3, 2}, {2, 0, 1}, {1, 2, 3}, {1, 0}};
  std::vector<int> everybody(static_cast<std::size_t>(group.world_size()));
  std::iota(everybody.begin(), everybody.end(), 0);
  const auto add = [&](const std::vector<int>& members) {
    const auto part = members == everybody ? std::optional(group) : group.split(members);
    groups.push_back({part.value_or(group), members, part ? part->allocate({4 << 20}, at::kByte) : torch::Tensor()});
  };
  add(everybody);
  for (const auto& members : kMembers) {
    const bool fits = *std::max_element(members.begin(), members.end()) < group.world_size();
    if (fits && members != everybody) add(members);
  }
  RandomRun run(groups, group.rank(), static_cast<std::uint64_t>(drawn_seed.item<std::int64_t>()));
  run.run(collectives);
  // Each rank is in at least half of the groups.
  CHECK(run.checked() > collectives / 3);
  group.barrier();
}
