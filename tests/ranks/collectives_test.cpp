#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <ddpkit/error.h>

#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::ProcessGroup;
using ddpkit::ReduceOp;

namespace {

/// Returns rank r's input of a collective: reproducible, and different on every rank.
torch::Tensor part(int rank, at::IntArrayRef sizes, at::ScalarType dtype) {
  torch::manual_seed(static_cast<std::uint64_t>(1000 + rank));
  if (dtype == at::kBool) return torch::randint(0, 2, sizes, at::kByte).to(dtype);
  if (at::isIntegralType(dtype, false)) return torch::randint(0, 5, sizes, at::kLong).to(dtype);
  if (at::isComplexType(dtype)) return torch::randn(sizes, dtype);
  return torch::randn(sizes, at::kFloat).to(dtype);
}

torch::Tensor sequential_sum(int ranks, at::IntArrayRef sizes, at::ScalarType dtype) {
  torch::Tensor sum = part(0, sizes, dtype);
  for (int r = 1; r < ranks; ++r) sum = sum + part(r, sizes, dtype);
  return sum;
}

const std::vector<std::int64_t> kSizes = {0, 1, 3, 1000, 8192, 65536, 65537, 300001};

}  // namespace

RANK_TEST("all_reduce of private memory is the sequential sum", "[shm]", 1, 2, 3, 5) {
  for (const std::int64_t size : kSizes) {
    torch::Tensor tensor = part(group.rank(), {size}, at::kFloat);
    group.all_reduce(tensor);
    CHECK(torch::equal(tensor, sequential_sum(group.world_size(), {size}, at::kFloat)));
  }
}

RANK_TEST("all_reduce of symmetric memory is the sequential sum", "[shm]", 1, 2, 3) {
  for (const std::int64_t size : kSizes) {
    torch::Tensor tensor = group.allocate({size}, at::kFloat);
    tensor.copy_(part(group.rank(), {size}, at::kFloat));
    group.all_reduce(tensor);
    CHECK(torch::equal(tensor, sequential_sum(group.world_size(), {size}, at::kFloat)));
  }
}

RANK_TEST("part of symmetric memory goes in place too", "[shm]", 2, 3) {
  const torch::Tensor whole = group.allocate({100000}, at::kDouble);
  whole.fill_(-1);
  torch::Tensor middle = whole.narrow(0, 1001, 50000);
  middle.copy_(part(group.rank(), {50000}, at::kDouble));
  group.all_reduce(middle);
  CHECK(torch::equal(middle, sequential_sum(group.world_size(), {50000}, at::kDouble)));
  CHECK((whole.narrow(0, 0, 1001) == -1).all().item<bool>());
  CHECK((whole.narrow(0, 51001, 48999) == -1).all().item<bool>());
}

RANK_TEST("symmetric memory on one rank and private on another agree on staging", "[shm]", 2, 3) {
  const torch::Tensor symmetric = group.allocate({100000}, at::kFloat);
  torch::Tensor tensor = group.rank() == 0 ? symmetric : torch::empty({100000});
  tensor.copy_(part(group.rank(), {100000}, at::kFloat));
  group.all_reduce(tensor);
  CHECK(torch::equal(tensor, sequential_sum(group.world_size(), {100000}, at::kFloat)));
}

RANK_TEST("all_reduce of every type", "[shm]", 2, 3) {
  for (const auto dtype :
       {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kDouble, at::kComplexFloat, at::kComplexDouble}) {
    torch::Tensor tensor = part(group.rank(), {1000}, dtype);
    group.all_reduce(tensor);
    INFO(c10::toString(dtype));
    CHECK(torch::equal(tensor, sequential_sum(group.world_size(), {1000}, dtype)));
  }
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    torch::Tensor tensor = part(group.rank(), {1000}, dtype);
    group.all_reduce(tensor);
    torch::Tensor sum = torch::zeros({1000});
    for (int r = 0; r < group.world_size(); ++r) sum += part(r, {1000}, dtype).to(at::kFloat);
    CHECK(torch::equal(tensor, sum.to(dtype)));
  }
}

RANK_TEST("all_reduce by every reduction", "[shm]", 2, 3) {
  const std::vector<std::int64_t> sizes{257};
  std::vector<torch::Tensor> parts;
  for (int r = 0; r < group.world_size(); ++r) parts.push_back(part(r, sizes, at::kLong));
  const auto check = [&](ReduceOp op, const auto& combine) {
    torch::Tensor expected = parts[0];
    for (std::size_t r = 1; r < parts.size(); ++r) expected = combine(expected, parts[r]);
    torch::Tensor tensor = parts[static_cast<std::size_t>(group.rank())].clone();
    group.all_reduce(tensor, op);
    CHECK(torch::equal(tensor, expected));
  };
  using T = const torch::Tensor&;
  check(ReduceOp::kSum, [](T a, T b) { return a + b; });
  check(ReduceOp::kProduct, [](T a, T b) { return a * b; });
  check(ReduceOp::kMin, [](T a, T b) { return torch::minimum(a, b); });
  check(ReduceOp::kMax, [](T a, T b) { return torch::maximum(a, b); });
  check(ReduceOp::kBand, [](T a, T b) { return a.bitwise_and(b); });
  check(ReduceOp::kBor, [](T a, T b) { return a.bitwise_or(b); });
  check(ReduceOp::kBxor, [](T a, T b) { return a.bitwise_xor(b); });
  torch::Tensor mean = part(group.rank(), {100000}, at::kFloat);
  group.all_reduce(mean, ReduceOp::kAvg);
  CHECK(torch::equal(mean, sequential_sum(group.world_size(), {100000}, at::kFloat) / group.world_size()));
}

RANK_TEST("non-contiguous tensors are reduced in place", "[shm]", 2) {
  torch::Tensor matrix = part(group.rank(), {300, 400}, at::kFloat);
  torch::Tensor transposed = matrix.t();
  group.all_reduce(transposed);
  CHECK(torch::equal(matrix, sequential_sum(2, {300, 400}, at::kFloat)));
  torch::Tensor column = torch::full({4, 3}, static_cast<float>(group.rank()));
  torch::Tensor middle = column.select(1, 1);
  group.broadcast(middle, 1);
  CHECK(torch::equal(middle, torch::ones({4})));
  CHECK(torch::equal(column.select(1, 0), torch::full({4}, static_cast<float>(group.rank()))));
}

RANK_TEST("broadcast from every root", "[shm]", 1, 2, 3) {
  for (int root = 0; root < group.world_size(); ++root) {
    for (const std::int64_t size : kSizes) {
      torch::Tensor tensor = part(group.rank(), {size}, at::kFloat);
      group.broadcast(tensor, root);
      CHECK(torch::equal(tensor, part(root, {size}, at::kFloat)));
    }
  }
}

RANK_TEST("all_gather stacks the ranks", "[shm]", 1, 2, 3) {
  for (const std::int64_t size : kSizes) {
    const torch::Tensor all = group.all_gather(part(group.rank(), {size, 2}, at::kInt));
    REQUIRE(all.sizes() == torch::IntArrayRef({group.world_size(), size, 2}));
    for (int r = 0; r < group.world_size(); ++r) CHECK(torch::equal(all[r], part(r, {size, 2}, at::kInt)));
  }
}

RANK_TEST("all_gather_bytes takes any length", "[shm]", 1, 2, 3) {
  const auto text = [](int rank) {
    return std::string(static_cast<std::size_t>(rank * 70000), static_cast<char>('a' + rank));
  };
  const auto all = group.all_gather_bytes(text(group.rank()));
  REQUIRE(all.size() == static_cast<std::size_t>(group.world_size()));
  for (int r = 0; r < group.world_size(); ++r) CHECK(all[static_cast<std::size_t>(r)] == text(r));
}

RANK_TEST("many collectives may be under way at once", "[shm]", 2, 3) {
  std::vector<torch::Tensor> tensors;
  std::vector<ddpkit::Work> works;
  const torch::Tensor symmetric = group.allocate({200, 20000}, at::kFloat);
  for (int i = 0; i < 200; ++i) {
    // Alternates small and large tensors, in private and in symmetric memory.
    torch::Tensor tensor = i % 3 == 0 ? symmetric[i] : torch::empty({i % 3 == 1 ? 10 : 100000});
    tensor.fill_(static_cast<float>(i + group.rank()));
    tensors.push_back(tensor);
    works.push_back(group.all_reduce_async(tensor));
  }
  // Waits in another order than the start order.
  for (std::size_t i = works.size(); i-- > 0;) works[i].wait();
  const float ranks = static_cast<float>(group.world_size());
  for (int i = 0; i < 200; ++i) {
    const float expected = static_cast<float>(i) * ranks + ranks * (ranks - 1) / 2;
    CHECK((tensors[static_cast<std::size_t>(i)] == expected).all().item<bool>());
  }
}

RANK_TEST("a collective completes by being asked", "[shm]", 2) {
  torch::Tensor tensor = torch::ones({100000});
  ddpkit::Work work = group.all_reduce_async(tensor);
  while (!work.is_completed()) {
  }
  CHECK((tensor == 2).all().item<bool>());
}

RANK_TEST("more ranks than cores stay correct", "[shm]", 8) {
  for (int round = 0; round < 20; ++round) {
    torch::Tensor tensor = torch::full({30000}, static_cast<float>(group.rank() + round));
    group.all_reduce(tensor);
    CHECK((tensor == 28 + 8 * round).all().item<bool>());
    group.barrier();
  }
}

RANK_TEST("symmetric memory outlives its group", "[shm]", 2) {
  torch::Tensor tensor;
  {
    const ProcessGroup inner = ddpkit::testing::another_group(group, "inner");
    tensor = inner.allocate({100000}, at::kFloat);
    tensor.fill_(1);
    inner.all_reduce(tensor);
    inner.barrier();
  }
  group.barrier();
  CHECK((tensor == 2).all().item<bool>());
}

TEST_CASE("all_reduce through gloo", "[ranks][gloo]") {
  ddpkit::testing::on_ranks(
      "all_reduce through gloo", 2,
      [](ProcessGroup& group) {
        CHECK(group.backend_name() == "gloo");
        torch::Tensor tensor = part(group.rank(), {1000}, at::kFloat);
        group.all_reduce(tensor);
        CHECK(torch::equal(tensor, sequential_sum(2, {1000}, at::kFloat)));
        CHECK(group.all_gather_bytes(std::to_string(group.rank())) == std::vector<std::string>{"0", "1"});
        group.barrier();
      },
      {.backend = "gloo"});
}

TEST_CASE("gloo and shm refuse an output of another data type than the input", "[ranks][gloo][shm]") {
  for (const std::string backend : {"gloo", "shm"}) {
    ddpkit::testing::on_ranks(
        "gloo and shm refuse an output of another data type than the input", 2,
        [](ProcessGroup& group) {
          const at::Tensor whole = part(group.rank(), {4}, at::kFloat), half = whole.narrow(0, 0, 2).clone();
          const auto refuses = ContainsSubstring("the input is of type Float, but the output of type Int");
          CHECK_THROWS_WITH(group.all_to_all(whole.to(at::kInt), whole), refuses);
          CHECK_THROWS_WITH(group.all_gather_into(whole.to(at::kInt), half), refuses);
          CHECK_THROWS_WITH(group.reduce_scatter(half.to(at::kInt), whole), refuses);
          if (group.rank() == 0) CHECK_THROWS_WITH(group.scatter(half.to(at::kInt), whole.view({2, 2})), refuses);
          group.barrier();
        },
        {.backend = backend});
  }
}

TEST_CASE("means of large float16 values through gloo are finite", "[ranks][gloo]") {
  ddpkit::testing::on_ranks("means of large float16 values through gloo are finite", {2, 3},
                            [](ProcessGroup& group) {
                              const auto large = [](std::int64_t size) { return at::full({size}, 60000, at::kHalf); };
                              const auto is_large = [&](const at::Tensor& tensor) {
                                return tensor.allclose(large(tensor.numel()), 1e-3);
                              };
                              at::Tensor tensor = large(5);
                              group.all_reduce(tensor, ReduceOp::kAvg);
                              CHECK(is_large(tensor));
                              tensor = large(5);
                              group.reduce(tensor, 1, ReduceOp::kAvg);
                              CHECK((group.rank() != 1 || is_large(tensor)));
                              const at::Tensor part = at::zeros({4}, at::kHalf), whole = large(4 * group.world_size());
                              group.reduce_scatter(part, whole, ReduceOp::kAvg);
                              CHECK(is_large(part));
                              CHECK(is_large(whole));
                              // Tests the mean by reduce() too, also in other data types.
                              tensor = at::full({5}, group.rank(), at::kDouble);
                              group.reduce(tensor, 0, ReduceOp::kAvg);
                              if (group.rank() == 0)
                                CHECK(tensor.allclose(at::full({5}, (group.world_size() - 1) / 2.0, at::kDouble)));
                              at::Tensor integers = at::ones({5}, at::kLong);
                              CHECK_THROWS_AS(group.reduce(integers, 0, ReduceOp::kAvg), ddpkit::InvalidArgument);
                              std::vector<at::Tensor> output{at::zeros({4}, at::kHalf)};
                              std::vector<std::vector<at::Tensor>> inputs{
                                  std::vector<at::Tensor>(static_cast<std::size_t>(group.world_size()), large(4))};
                              c10d::ReduceScatterOptions options;
                              options.reduceOp = c10d::ReduceOp::AVG;
                              group.backend()->reduce_scatter(output, inputs, options)->wait();
                              CHECK(is_large(output[0]));
                              group.barrier();
                            },
                            {.backend = "gloo"});
}
