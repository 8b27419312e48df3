// Collectives that copy between tensors in symmetric memory: the other ranks read the tensors in place.
#include <torch/torch.h>

#include <ddpkit/error.h>

#include "ranks/parts.h"
#include "ranks/thread_ranks.h"
#include "support/catch.h"
#include "support/ranks.h"
#include "tensor/flat_layout.h"

using ddpkit::ProcessGroup;
using ddpkit::ReduceOp;
using ddpkit::testing::part;

namespace {

// Sizes on both sides of the limit of staging, 4 KiB.
const std::vector<std::int64_t> kSizes = {0, 1, 63, 64, 1023, 1024, 4095, 4096, 65537, 300001};

torch::Tensor stacked_parts(int ranks, at::IntArrayRef sizes) {
  std::vector<torch::Tensor> parts;
  for (int r = 0; r < ranks; ++r) parts.push_back(part(r, sizes));
  return torch::stack(parts);
}

torch::Tensor symmetric_copy(const ProcessGroup& group, const torch::Tensor& tensor) {
  torch::Tensor copy = group.allocate(tensor.sizes(), tensor.scalar_type());
  return copy.copy_(tensor);
}

}  // namespace

RANK_TEST("broadcast of symmetric memory, from every root", "[shm]", 1, 2, 3) {
  for (const std::int64_t size : kSizes) {
    const torch::Tensor tensor = group.allocate({size}, at::kFloat);
    for (int root = 0; root < group.world_size(); ++root) {
      tensor.copy_(part(group.rank(), {size}));
      group.broadcast(tensor, root);
      CHECK(torch::equal(tensor, part(root, {size})));
    }
  }
}

RANK_TEST("all_gather of symmetric memory", "[shm]", 1, 2, 3) {
  const std::int64_t ranks = group.world_size();
  for (const std::int64_t size : kSizes) {
    const torch::Tensor expected = stacked_parts(group.world_size(), {size});
    const torch::Tensor input = symmetric_copy(group, part(group.rank(), {size}));
    torch::Tensor output = torch::full({ranks, size}, -1.0f);
    group.all_gather_into(output, input);
    CHECK(torch::equal(output, expected));
    CHECK(torch::equal(input, part(group.rank(), {size})));

    // The input is this rank's row of the output.
    torch::Tensor all = group.allocate({ranks, size}, at::kFloat);
    all.fill_(-1);
    all[group.rank()].copy_(part(group.rank(), {size}));
    group.all_gather_into(all, all[group.rank()]);
    CHECK(torch::equal(all, expected));
  }
}

RANK_TEST("reduce_scatter of symmetric memory", "[shm]", 1, 2, 3) {
  const std::int64_t ranks = group.world_size();
  for (const std::int64_t size : kSizes) {
    const torch::Tensor parts = stacked_parts(group.world_size(), {ranks, size});
    const torch::Tensor sum = parts.sum(0)[group.rank()], highest = std::get<0>(parts.max(0))[group.rank()];
    torch::Tensor input = symmetric_copy(group, part(group.rank(), {ranks, size}));
    torch::Tensor output = torch::full({size}, -1.0f);
    group.reduce_scatter(output, input);
    CHECK(torch::equal(output, sum));
    group.reduce_scatter(output, input, ReduceOp::kMax);
    CHECK(torch::equal(output, highest));
    CHECK(torch::equal(input, part(group.rank(), {ranks, size})));

    // The output is this rank's row of the input.
    group.reduce_scatter(input[group.rank()], input);
    CHECK(torch::equal(input[group.rank()], sum));
  }
}

RANK_TEST("a coalesced reduce_scatter gives each rank its shard of all tensors", "[shm]", 1, 2, 3) {
  for (const at::ScalarType dtype : {at::kInt, at::kDouble, at::kComplexFloat}) {
    // More tensors than one collective takes.
    std::vector<std::int64_t> numels;
    for (std::int64_t i = 0; i < 300; ++i) numels.push_back(1 + i * i % 97);
    const ddpkit::FlatLayout layout = ddpkit::make_flat_layout(numels, c10::elementSize(dtype), group.world_size());
    const torch::Tensor memory = group.allocate({layout.numel}, dtype);
    torch::Tensor sums = torch::zeros({layout.numel}, dtype);
    std::vector<at::Tensor> tensors;
    for (std::size_t i = 0; i < numels.size(); ++i) {
      tensors.push_back(memory.narrow(0, layout.offsets[i], numels[i]));
      for (int r = 0; r < group.world_size(); ++r)
        sums.narrow(0, layout.offsets[i], numels[i]).add_(part(r, {numels[i]}).to(dtype));
      tensors.back().copy_(part(group.rank(), {numels[i]}));
    }
    const torch::Tensor shard = torch::zeros({layout.shard_numel}, dtype);
    auto& symmetric = *ddpkit::Backend::of(group)->symmetric_memory();
    const c10d::ReduceOp sum(c10d::ReduceOp::SUM);
    symmetric.reduce_scatter_coalesced(tensors, shard, sum)->wait();
    CHECK(torch::equal(shard, sums.narrow(0, group.rank() * layout.shard_numel, layout.shard_numel)));
    CHECK_THROWS_WITH(symmetric.reduce_scatter_coalesced(tensors, shard.narrow(0, 0, 1), sum),
                      ContainsSubstring("the shard must be dense"));
    group.barrier();
  }
}

RANK_TEST("one rank with private memory makes all of them stage", "[shm]", 2, 3) {
  const std::int64_t ranks = group.world_size(), size = 100000;
  const auto mixed = [&](const torch::Tensor& tensor) {
    const torch::Tensor symmetric = symmetric_copy(group, tensor);
    return group.rank() == 1 ? tensor.clone() : symmetric;
  };
  torch::Tensor output = torch::full({ranks, size}, -1.0f);
  group.all_gather_into(output, mixed(part(group.rank(), {size})));
  CHECK(torch::equal(output, stacked_parts(group.world_size(), {size})));
  torch::Tensor row = torch::full({size}, -1.0f);
  group.reduce_scatter(row, mixed(part(group.rank(), {ranks, size})));
  CHECK(torch::equal(row, stacked_parts(group.world_size(), {ranks, size}).sum(0)[group.rank()]));
  for (int root = 0; root < group.world_size(); ++root) {
    const torch::Tensor tensor = mixed(part(group.rank(), {size}));
    group.broadcast(tensor, root);
    CHECK(torch::equal(tensor, part(root, {size})));
  }
}

RANK_TEST("an input in symmetric memory is the caller's again after the call", "[shm]", 2, 3) {
  const std::int64_t ranks = group.world_size(), size = 50000;
  const torch::Tensor input = group.allocate({size}, at::kFloat), wide = group.allocate({ranks, size}, at::kFloat);
  torch::Tensor output = torch::empty({ranks, size}), row = torch::empty({size});
  for (int round = 0; round < 200; ++round) {
    input.fill_(static_cast<float>(round + group.rank()));
    group.all_gather_into(output, input);
    input.fill_(-1);
    for (int r = 0; r < group.world_size(); ++r)
      REQUIRE((output[r] == static_cast<float>(round + r)).all().item<bool>());
    wide.fill_(static_cast<float>(round + group.rank()));
    group.reduce_scatter(row, wide, ReduceOp::kMax);
    wide.fill_(1e6f);
    REQUIRE((row == static_cast<float>(round + group.world_size() - 1)).all().item<bool>());
    input.fill_(static_cast<float>(round));
    group.broadcast(input, round % group.world_size());
    REQUIRE((input == static_cast<float>(round)).all().item<bool>());
  }
}

RANK_TEST("gathering and scattering in symmetric memory takes every type", "[shm]", 2) {
  for (const auto dtype : {at::kByte, at::kLong, at::kHalf, at::kBFloat16, at::kDouble, at::kComplexFloat}) {
    INFO(c10::toString(dtype));
    const torch::Tensor wide = symmetric_copy(group, part(group.rank(), {2, 20000}, dtype));
    torch::Tensor all = torch::empty({2, 2, 20000}, dtype), row = torch::empty({20000}, dtype);
    group.all_gather_into(all, wide);
    for (int r = 0; r < 2; ++r) CHECK(torch::equal(all[r], part(r, {2, 20000}, dtype)));
    group.reduce_scatter(row, wide);
    CHECK(torch::equal(row, (part(0, {2, 20000}, dtype) + part(1, {2, 20000}, dtype))[group.rank()]));
  }
}

RANK_TEST("a part of the whole may lie in it only where it belongs", "[shm][errors]", 2, 3) {
  const torch::Tensor whole = torch::zeros({group.world_size(), 100});
  const torch::Tensor elsewhere = whole[(group.rank() + 1) % group.world_size()];
  CHECK_THROWS_WITH(group.all_gather_into(whole, elsewhere), ContainsSubstring("within the output only"));
  CHECK_THROWS_WITH(group.reduce_scatter(elsewhere, whole), ContainsSubstring("within the input only"));
  CHECK_THROWS_AS(group.all_gather_into_async(whole, whole.view({-1}).narrow(0, 1, 100)), ddpkit::InvalidArgument);
  group.all_gather_into(whole, whole[group.rank()]);
}
