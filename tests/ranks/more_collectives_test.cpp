// Collectives other than all-reduce, broadcast and all-gather, and subgroups.
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <numeric>
#include <thread>

#include <ddpkit/error.h>

#include "ranks/parts.h"
#include "support/catch.h"
#include "support/premul_sum.h"
#include "support/ranks.h"

using ddpkit::ProcessGroup;
using ddpkit::ReduceOp;
using ddpkit::testing::part;

namespace {

torch::Tensor sum_of_parts(int ranks, at::IntArrayRef sizes) {
  torch::Tensor sum = part(0, sizes);
  for (int r = 1; r < ranks; ++r) sum += part(r, sizes);
  return sum;
}

const std::vector<std::int64_t> kSizes = {0, 1, 100, 70000, 300001};

}  // namespace

RANK_TEST("reduce gives the root the sum", "[shm]", 1, 2, 3) {
  for (const std::int64_t size : kSizes) {
    for (int root = 0; root < group.world_size(); ++root) {
      torch::Tensor tensor = part(group.rank(), {size});
      group.reduce(tensor, root);
      CHECK(torch::equal(tensor,
                         group.rank() == root ? sum_of_parts(group.world_size(), {size}) : part(group.rank(), {size})));
    }
  }
}

RANK_TEST("reduce_scatter gives each rank its part of the sum", "[shm]", 1, 2, 3) {
  for (const std::int64_t size : kSizes) {
    torch::Tensor output = torch::full({size}, -1.0f);
    group.reduce_scatter(output, part(group.rank(), {group.world_size(), size}));
    CHECK(torch::equal(output, sum_of_parts(group.world_size(), {group.world_size(), size})[group.rank()]));
    group.reduce_scatter(output, part(group.rank(), {group.world_size(), size}), ReduceOp::kMax);
    torch::Tensor highest = part(0, {group.world_size(), size});
    for (int r = 1; r < group.world_size(); ++r) highest = torch::maximum(highest, part(r, {group.world_size(), size}));
    CHECK(torch::equal(output, highest[group.rank()]));
  }
}

RANK_TEST("gather and scatter, to and from every root", "[shm]", 1, 2, 3) {
  for (const std::int64_t size : kSizes) {
    for (int root = 0; root < group.world_size(); ++root) {
      const torch::Tensor all = group.gather(part(group.rank(), {size}), root);
      CHECK(all.defined() == (group.rank() == root));
      for (int r = 0; all.defined() && r < group.world_size(); ++r) CHECK(torch::equal(all[r], part(r, {size})));

      torch::Tensor mine = torch::full({size}, -1.0f);
      const torch::Tensor source = part(root, {group.world_size(), size});
      group.scatter(mine, group.rank() == root ? source : torch::Tensor(), root);
      CHECK(torch::equal(mine, source[group.rank()]));
    }
  }
}

RANK_TEST("all_to_all with even splits", "[shm]", 1, 2, 3) {
  const std::int64_t ranks = group.world_size();
  for (const std::int64_t size : kSizes) {
    torch::Tensor output = torch::full({ranks, size}, -1.0f);
    group.all_to_all(output, part(group.rank(), {ranks, size}));
    for (int r = 0; r < ranks; ++r) CHECK(torch::equal(output[r], part(r, {ranks, size})[group.rank()]));
  }
}

RANK_TEST("all_to_all with uneven splits", "[shm]", 1, 2, 3) {
  // Rank a sends rank b (a + 2 b) * 30000 rows of 2; from rank 0 to rank 0 no rows.
  const auto rows = [](int from, int to) { return std::int64_t{30000} * (from + 2 * to); };
  std::vector<std::int64_t> input_splits, output_splits;
  for (int r = 0; r < group.world_size(); ++r) {
    input_splits.push_back(rows(group.rank(), r));
    output_splits.push_back(rows(r, group.rank()));
  }
  const auto input_of = [&](int rank) {
    std::int64_t total = 0;
    for (int r = 0; r < group.world_size(); ++r) total += rows(rank, r);
    return part(rank, {total, 2});
  };
  torch::Tensor output =
      torch::full({std::accumulate(output_splits.begin(), output_splits.end(), std::int64_t{0}), 2}, -1.0f);
  group.all_to_all(output, input_of(group.rank()), output_splits, input_splits);
  std::int64_t begin = 0;
  for (int r = 0; r < group.world_size(); ++r) {
    std::int64_t start = 0;
    for (int to = 0; to < group.rank(); ++to) start += rows(r, to);
    const std::int64_t count = rows(r, group.rank());
    CHECK(torch::equal(output.narrow(0, begin, count), input_of(r).narrow(0, start, count)));
    begin += count;
  }
}

RANK_TEST("all_to_all where sender and receiver disagree is a mismatch", "[shm][errors]", 2, 3) {
  std::vector<std::int64_t> splits(static_cast<std::size_t>(group.world_size()), 2);
  auto output_splits = splits;
  if (group.rank() == 1) output_splits[0] = 3;
  torch::Tensor output = torch::zeros({std::accumulate(output_splits.begin(), output_splits.end(), std::int64_t{0})});
  CHECK_THROWS_AS(
      [&] {
        group.all_to_all(output, torch::zeros({2 * group.world_size()}), output_splits, splits);
        group.barrier();
      }(),
      ddpkit::CollectiveMismatch);
}

RANK_TEST("c10d's lists and coalesced forms", "[shm]", 2, 3) {
  auto& backend = *group.backend();
  const int ranks = group.world_size(), rank = group.rank();
  std::vector<torch::Tensor> several{part(rank, {10}), part(rank, {70000}), part(rank, {3, 3})};
  backend.allreduce_coalesced(several)->wait();
  CHECK(torch::equal(several[0], sum_of_parts(ranks, {10})));
  CHECK(torch::equal(several[1], sum_of_parts(ranks, {70000})));
  CHECK(torch::equal(several[2], sum_of_parts(ranks, {3, 3})));

  std::vector<std::vector<torch::Tensor>> lists(1);
  for (int r = 0; r < ranks; ++r) lists[0].push_back(torch::empty({5, 4}).t());  // Not contiguous.
  std::vector<torch::Tensor> inputs{part(rank, {4, 5})};
  backend.allgather(lists, inputs)->wait();
  for (int r = 0; r < ranks; ++r) CHECK(torch::equal(lists[0][static_cast<std::size_t>(r)], part(r, {4, 5})));

  std::vector<torch::Tensor> outputs{torch::empty({6})};
  std::vector<std::vector<torch::Tensor>> parts(1);
  for (int r = 0; r < ranks; ++r) parts[0].push_back(part(rank + 10 * r, {6}));
  backend.reduce_scatter(outputs, parts)->wait();
  torch::Tensor expected = torch::zeros({6});
  for (int r = 0; r < ranks; ++r) expected += part(r + 10 * rank, {6});
  CHECK(torch::equal(outputs[0], expected));

  std::vector<torch::Tensor> to, from;
  for (int r = 0; r < ranks; ++r) {
    to.push_back(part(rank, {r + 1}));
    from.push_back(torch::empty({rank + 1}));
  }
  backend.alltoall(from, to)->wait();
  for (int r = 0; r < ranks; ++r) CHECK(torch::equal(from[static_cast<std::size_t>(r)], part(r, {rank + 1})));

  std::vector<torch::Tensor> scaled{part(rank, {100})};
  c10d::AllreduceOptions options;
  options.reduceOp = ddpkit::testing::premul_sum(0.5);
  backend.allreduce(scaled, options)->wait();
  CHECK(torch::equal(scaled[0], sum_of_parts(ranks, {100}) * 0.5));
}

RANK_TEST("a coalesced call that is refused for its last part has moved none", "[shm][errors]", 2) {
  auto& backend = *group.backend();
  std::vector<torch::Tensor> several{torch::full({10}, group.rank() + 1, torch::kInt), part(group.rank(), {10})};
  c10d::AllreduceCoalescedOptions both_bits;
  both_bits.reduceOp = c10d::ReduceOp(c10d::ReduceOp::BAND);  // Not for floating point.
  CHECK_THROWS_AS(backend.allreduce_coalesced(several, both_bits), ddpkit::InvalidArgument);

  // The last part is at the other rank's position.
  torch::Tensor whole = torch::full({2 * 6}, -1.0f);
  const torch::Tensor misplaced = whole.narrow(0, 6 * (1 - group.rank()), 6);
  torch::Tensor gathered = torch::full({2 * 6}, -1.0f), reduced = torch::full({6}, -1.0f);
  std::vector<torch::Tensor> large{gathered, whole}, parts{part(group.rank(), {6}), misplaced};
  CHECK_THROWS_AS(backend.allgather_into_tensor_coalesced(large, parts), ddpkit::InvalidArgument);
  large = {part(group.rank(), {2 * 6}), whole};
  parts = {reduced, misplaced};
  CHECK_THROWS_AS(backend.reduce_scatter_tensor_coalesced(parts, large), ddpkit::InvalidArgument);

  // A later collective is complete only after all earlier calls.
  group.barrier();
  CHECK(torch::equal(several[0], torch::full({10}, group.rank() + 1, torch::kInt)));
  CHECK(torch::equal(gathered, torch::full({2 * 6}, -1.0f)));
  CHECK(torch::equal(reduced, torch::full({6}, -1.0f)));
}

RANK_TEST("a result that cannot be put into its tensor is refused before anything moves", "[shm][errors]", 1, 2) {
  const torch::Tensor one = torch::ones({1});
  const torch::Tensor several = one.expand({8});
  const auto refusal = ContainsSubstring("sizes [8] and strides [0], whose elements share memory");
  CHECK_THROWS_WITH(group.all_reduce_async(several),
                    "all_reduce: the result cannot be put into a tensor of sizes [8] and strides [0], whose elements "
                    "share memory: give its contiguous() copy");
  CHECK_THROWS_WITH(group.all_reduce(several), refusal);
  if (group.rank() == 1) CHECK_THROWS_WITH(group.broadcast(several), refusal);
  if (group.rank() == 1) CHECK_THROWS_WITH(group.recv(several, 0), refusal);
  // It is a valid input.
  CHECK(torch::equal(group.all_gather(several), torch::ones({group.world_size(), 8})));
  const torch::Tensor conjugate = torch::conj(torch::ones({4}, torch::kComplexFloat));
  CHECK_THROWS_WITH(group.all_gather(conjugate), ContainsSubstring("resolve_conj()"));
  CHECK_THROWS_WITH(group.all_reduce(conjugate), ContainsSubstring("all_reduce: the tensor is a conjugate view"));
  std::vector<torch::Tensor> large{torch::ones({2 * group.world_size()})}, sparse{torch::ones({2}).to_sparse()};
  CHECK_THROWS_AS(group.backend()->allgather_into_tensor_coalesced(large, sparse), ddpkit::InvalidArgument);
  group.barrier();
}

RANK_TEST("an error while a result is copied back is thrown by its wait", "[shm][errors]", 1, 2) {
  // An inference tensor cannot be written outside inference mode. Only a tensor that is not contiguous is copied back.
  torch::Tensor frozen;
  {
    const c10::InferenceMode mode;
    frozen = torch::ones({4, 2}).t();
  }
  std::vector<torch::Tensor> tensors{frozen};
  const auto work = group.backend()->allreduce(tensors);
  group.barrier();
  torch::Tensor sum = torch::ones({3});
  group.all_reduce(sum);
  CHECK(sum[2].item<float>() == static_cast<float>(group.world_size()));
  CHECK_THROWS_WITH(work->wait(), ContainsSubstring("nference tensor"));
  CHECK(work->isCompleted());
  CHECK_FALSE(work->isSuccess());
  const auto another = group.backend()->allreduce(tensors);
  another->getFuture()->wait();
  CHECK(another->getFuture()->hasError());
  group.barrier();
}

RANK_TEST("futures end with their group, and one of nothing at once", "[shm][errors]", 2) {
  std::vector<torch::Tensor> none;
  const auto empty = group.backend()->allreduce_coalesced(none);
  CHECK(empty->wait());
  empty->getFuture()->wait();
  CHECK_FALSE(empty->getFuture()->hasError());
  CHECK(empty->sourceRank() == -1);
  auto own = std::make_optional(ddpkit::testing::another_group(group, "released"));
  if (group.rank() == 0) {
    std::vector<torch::Tensor> tensors{torch::ones({10})};
    const auto future = own->backend()->allreduce(tensors)->getFuture();
    own.reset();
    future->wait();
    CHECK(future->hasError());
    CHECK_THROWS_WITH(future->value(), ContainsSubstring("released before the end of its collective"));
  }
  group.barrier();
}

RANK_TEST("a future completes without a wait for the work", "[shm]", 1, 2) {
  std::vector<torch::Tensor> tensors{part(group.rank(), {500000})};
  const auto future = group.backend()->allreduce(tensors)->getFuture();
  future->waitAndThrow();
  CHECK(torch::equal(tensors[0], sum_of_parts(group.world_size(), {500000})));
  CHECK(torch::equal(future->value().toTensorVector()[0], tensors[0]));
}

RANK_TEST("groups of some ranks work beside each other and the whole", "[shm]", 4) {
  const auto evens = group.split({0, 2});
  const auto reversed = group.split({3, 1});
  const ProcessGroup& mine = group.rank() % 2 == 0 ? evens.value() : reversed.value();
  CHECK(evens.has_value() == (group.rank() % 2 == 0));
  CHECK(mine.world_size() == 2);
  CHECK(mine.rank() == (group.rank() % 2 == 0 ? group.rank() / 2 : (3 - group.rank()) / 2));
  for (int round = 0; round < 50; ++round) {
    torch::Tensor small = torch::full({1000}, static_cast<float>(group.rank()));
    torch::Tensor whole = small.clone();
    const auto work = group.all_reduce_async(whole);
    mine.all_reduce(small);
    group.backend();
    ddpkit::Work(work).wait();
    CHECK((small == (group.rank() % 2 == 0 ? 2 : 4)).all().item<bool>());
    CHECK((whole == 6).all().item<bool>());
  }
  CHECK_THROWS_AS(group.split({0, 0}), ddpkit::InvalidArgument);
  CHECK_THROWS_AS(group.split({4}), ddpkit::InvalidArgument);
}

RANK_TEST("a wait in one group moves the others on", "[shm]", 2) {
  const ProcessGroup other = group.split({0, 1}).value();
  torch::Tensor large = torch::ones({3000000}), small = torch::ones({10});
  if (group.rank() == 0) {
    // Rank 1 starts the small collective only after the large one, which needs this rank.
    ddpkit::Work work = group.all_reduce_async(large);
    other.all_reduce(small);
    work.wait();
  } else {
    group.all_reduce(large);
    other.all_reduce(small);
  }
  CHECK((large == 2).all().item<bool>());
  CHECK((small == 2).all().item<bool>());
}

RANK_TEST("several groups at once, each from a separate thread", "[shm]", 2) {
  std::vector<ProcessGroup> groups;
  for (int i = 0; i < 3; ++i) groups.push_back(group.split({0, 1}).value());
  std::vector<std::thread> threads;
  std::vector<int> good(groups.size(), 0);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 200; ++round) {
        torch::Tensor tensor = torch::full({5000}, static_cast<float>(round + 1));
        groups[i].all_reduce(tensor);
        good[i] += (tensor == 2 * (round + 1)).all().item<bool>() ? 1 : 0;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const int count : good) CHECK(count == 200);
}
