// Ranks that simulate several hosts: shared memory within each host, gloo between hosts.
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <ddpkit/error.h>
#include <ddpkit/parallel/distributed_data_parallel.h>

#include "comm/backends/hierarchical_backend.h"
#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::ProcessGroup;
using ddpkit::ReduceOp;

namespace {

constexpr auto kTimeout = std::chrono::minutes(10);  // Only a hang reaches it.

ProcessGroup on_hosts_of(const ProcessGroup& group, int local, int local_rank = -1) {
  static int number = 0;
  const auto store = c10::make_intrusive<c10d::PrefixStore>("hosts-" + std::to_string(number++), group.store());
  ddpkit::LaunchEnvironment environment;
  environment.rank = group.rank();
  environment.world_size = group.world_size();
  environment.local_world_size = local;
  environment.local_rank = local_rank < 0 ? group.rank() % local : local_rank;
  return {ddpkit::create_hierarchical_backend(store, environment, kTimeout), store, at::kCPU, environment};
}

// Returns numbers of ranks per host that divide the world size.
std::vector<int> hosts_for(const ProcessGroup& group) {
  std::vector<int> locals;
  for (int local = 1; local <= group.world_size(); ++local) {
    if (group.world_size() % local == 0) locals.push_back(local);
  }
  return locals;
}

torch::Tensor part(int rank, at::IntArrayRef sizes, at::ScalarType dtype) {
  torch::manual_seed(static_cast<std::uint64_t>(300 + rank));
  return torch::randint(1, 20, sizes, at::kLong).to(dtype);
}

// Small sizes, odd sizes, and sizes of several pieces.
const std::vector<std::int64_t> kSizes = {0, 1, 3, 1000, 70001, 3'000'001};

}  // namespace

RANK_TEST("the hierarchical all-reduce is that of all ranks", "[hierarchical]", 2, 4, 6) {
  for (const int local : hosts_for(group)) {
    const ProcessGroup hosts = on_hosts_of(group, local);
    CHECK(hosts.backend_name() == "hierarchical");
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kLong, at::kHalf, at::kBFloat16}) {
      for (const std::int64_t size : kSizes) {
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax}) {
          if (op == ReduceOp::kAvg && dtype == at::kLong) continue;
          if (size > 1'000'000 && (dtype != at::kFloat || op != ReduceOp::kAvg)) continue;
          CAPTURE(local, size, c10::toString(dtype), static_cast<int>(op));
          torch::Tensor expected = part(0, {size}, dtype);
          for (int r = 1; r < group.world_size(); ++r) {
            const torch::Tensor other = part(r, {size}, dtype);
            expected = op == ReduceOp::kMin   ? torch::minimum(expected, other)
                       : op == ReduceOp::kMax ? torch::maximum(expected, other)
                                              : expected + other;
          }
          if (op == ReduceOp::kAvg) expected = expected / group.world_size();
          torch::Tensor tensor = part(group.rank(), {size}, dtype);
          hosts.all_reduce(tensor, op);
          // Sums of small whole numbers are exact in every order. Means have one division, except for float16.
          CHECK((dtype == at::kHalf && op == ReduceOp::kAvg ? torch::allclose(tensor, expected, 2e-3)
                                                            : tensor.equal(expected)));
        }
      }
    }
    // A tensor that is not contiguous.
    torch::Tensor turned = part(group.rank(), {30, 50}, at::kFloat).t();
    torch::Tensor expected = part(0, {30, 50}, at::kFloat);
    for (int r = 1; r < group.world_size(); ++r) expected += part(r, {30, 50}, at::kFloat);
    hosts.all_reduce(turned);
    CHECK(turned.equal(expected.t()));
  }
}

RANK_TEST("a hierarchical mean of large float16 values is finite, as on one host", "[hierarchical]", 2, 4, 6) {
  for (const int local : hosts_for(group)) {
    CAPTURE(local);
    torch::Tensor tensor = torch::full({10}, 60000, at::kHalf);
    on_hosts_of(group, local).all_reduce(tensor, ReduceOp::kAvg);
    CHECK(torch::allclose(tensor, torch::full({10}, 60000, at::kHalf), 1e-3));
  }
}

RANK_TEST("hierarchical collectives of complex numbers and of types that gloo does not know", "[hierarchical]", 4) {
  const auto of = [](int rank) {
    return torch::complex(part(rank, {3, 5}, at::kFloat), part(rank + 9, {3, 5}, at::kFloat));
  };
  const torch::Tensor sum = of(0) + of(1) + of(2) + of(3);
  for (const int local : hosts_for(group)) {
    CAPTURE(local);
    const ProcessGroup hosts = on_hosts_of(group, local);
    for (const bool turned : {false, true}) {
      torch::Tensor tensor = turned ? of(group.rank()).t().contiguous().t() : of(group.rank());
      hosts.all_reduce(tensor, ReduceOp::kAvg);
      CHECK(tensor.equal(sum / 4));
    }
    torch::Tensor tensor = of(group.rank());
    CHECK_THROWS_WITH(hosts.all_reduce(tensor, ReduceOp::kMax), ContainsSubstring("not defined for ComplexFloat"));
    tensor = torch::_conj(tensor);
    CHECK_THROWS_WITH(hosts.all_reduce(tensor), ContainsSubstring("conjugate view"));
    tensor = of(group.rank());
    hosts.broadcast(tensor, 1);
    CHECK(tensor.equal(of(1)));
    for (const at::ScalarType dtype : {at::kComplexDouble, at::kShort, at::kBool}) {
      const torch::Tensor all = hosts.all_gather(part(group.rank(), {3, 7}, at::kLong).to(dtype));
      for (int r = 0; r < group.world_size(); ++r) CHECK(all[r].equal(part(r, {3, 7}, at::kLong).to(dtype)));
    }
  }
}

RANK_TEST("many hierarchical collectives at once keep their order", "[hierarchical]", 4) {
  const ProcessGroup hosts = on_hosts_of(group, 2);
  std::vector<torch::Tensor> tensors;
  std::vector<ddpkit::Work> works;
  for (int i = 0; i < 40; ++i) {
    tensors.push_back(part(group.rank() + 10 * i, {(i * 7919) % 200000 + 1}, at::kFloat));
    works.push_back(i % 5 == 4 ? hosts.broadcast_async(tensors.back(), i % 4) : hosts.all_reduce_async(tensors.back()));
  }
  for (std::size_t i = works.size(); i-- > 0;) works[i].wait();
  for (int i = 0; i < 40; ++i) {
    CAPTURE(i);
    const auto of = [&](int rank) { return part(rank + 10 * i, {(i * 7919) % 200000 + 1}, at::kFloat); };
    const torch::Tensor expected = i % 5 == 4 ? of(i % 4) : of(0) + of(1) + of(2) + of(3);
    CHECK(tensors[static_cast<std::size_t>(i)].equal(expected));
  }
}

RANK_TEST("hierarchical collectives on one host keep their order too", "[hierarchical]", 2, 3) {
  const ProcessGroup hosts = on_hosts_of(group, group.world_size());
  std::vector<torch::Tensor> tensors;
  std::vector<ddpkit::Work> works;
  for (int i = 0; i < 60; ++i) {
    tensors.push_back(part(group.rank() + 10 * i, {(i * 7919) % 200000 + 1}, at::kFloat));
    works.push_back(hosts.all_reduce_async(tensors.back()));
    const torch::Tensor all = hosts.all_gather(torch::full({3}, group.rank() + i));
    for (int r = 0; r < group.world_size(); ++r) CHECK(all[r].equal(torch::full({3}, r + i)));
  }
  for (ddpkit::Work& work : works) work.wait();
  for (int i = 0; i < 60; ++i) {
    torch::Tensor expected = torch::zeros({(i * 7919) % 200000 + 1});
    for (int r = 0; r < group.world_size(); ++r) expected += part(r + 10 * i, expected.sizes(), at::kFloat);
    CHECK(tensors[static_cast<std::size_t>(i)].equal(expected));
  }
}

RANK_TEST("the other hierarchical collectives", "[hierarchical]", 2, 4, 6) {
  for (const int local : hosts_for(group)) {
    CAPTURE(local);
    const ProcessGroup hosts = on_hosts_of(group, local);
    for (int root = 0; root < group.world_size(); ++root) {
      torch::Tensor tensor = part(group.rank(), {1001}, at::kDouble);
      hosts.broadcast(tensor, root);
      CHECK(tensor.equal(part(root, {1001}, at::kDouble)));
    }
    const torch::Tensor all = hosts.all_gather(part(group.rank(), {3, 7}, at::kFloat));
    for (int r = 0; r < group.world_size(); ++r) CHECK(all[r].equal(part(r, {3, 7}, at::kFloat)));
    const auto texts = hosts.all_gather_bytes(std::string(static_cast<std::size_t>(group.rank()) + 1, 'x'));
    for (std::size_t r = 0; r < texts.size(); ++r) CHECK(texts[r].size() == r + 1);
    hosts.barrier();
    const torch::Tensor gathered = hosts.gather(torch::full({2}, group.rank()), 1);
    if (group.rank() == 1) CHECK(gathered.sum().item<std::int64_t>() == group.world_size() * (group.world_size() - 1));
    const auto pair = hosts.split({0, 1});
    CHECK(pair.has_value() == (group.rank() < 2));
    if (pair) {
      CHECK(pair->backend_name() == "gloo");
      // All simulated hosts are one host, which a subgroup detects.
      CHECK(pair->local_world_size() == 2);
      CHECK(pair->local_rank() == group.rank());
      CHECK(pair->all_gather(torch::full({2}, group.rank())).sum().item<std::int64_t>() == 2);
    }
    group.barrier();
  }
}

RANK_TEST("DistributedDataParallel over hosts has the gradient of the joined batch, the same bits on all ranks",
          "[hierarchical]", 4) {
  const ProcessGroup hosts = on_hosts_of(group, 2);
  const auto make = [] {
    torch::manual_seed(1);
    torch::nn::Sequential model(torch::nn::Linear(20, 300), torch::nn::Tanh(), torch::nn::Linear(300, 5));
    model->to(at::kDouble);
    return model;
  };
  const auto batch = [](int rank) {
    torch::manual_seed(static_cast<std::uint64_t>(50 + rank));
    return torch::randn({6, 20}, at::kDouble);
  };
  auto model = make();
  ddpkit::DistributedDataParallel ddp(model, hosts, {.bucket_cap_mb = 0.01});
  ddp(batch(group.rank())).pow(2).mean().backward();
  auto alone = make();
  alone->forward(torch::cat({batch(0), batch(1), batch(2), batch(3)})).pow(2).mean().backward();
  for (std::size_t i = 0; i < model->parameters().size(); ++i) {
    const torch::Tensor gradient = model->parameters()[i].grad();
    CHECK(torch::allclose(gradient, alone->parameters()[i].grad(), 1e-12, 1e-12));
    const torch::Tensor all = group.all_gather(gradient.contiguous());
    for (int r = 1; r < group.world_size(); ++r) CHECK(all[r].equal(all[0]));
  }
}

RANK_TEST("unequal numbers of ranks per host are refused", "[hierarchical]", 3) {
  // Two ranks on the first host, one on the second.
  const int local = group.rank() < 2 ? 2 : 1, number = group.rank() < 2 ? group.rank() : 0;
  CHECK_THROWS_WITH(on_hosts_of(group, local, number), ContainsSubstring("equally many ranks on each host"));
  group.barrier();
}

RANK_TEST("hierarchical errors count ranks over all hosts", "[hierarchical]", 4) {
  const ProcessGroup hosts = on_hosts_of(group, 2);
  group.barrier();
  if (group.rank() == 3) {
    hosts.abort("the loss is NaN");
  } else if (group.rank() == 2) {
    torch::Tensor tensor = torch::ones({5});
    try {
      hosts.all_reduce(tensor);
      FAIL("no error");
    } catch (const ddpkit::PeerLost& error) {
      CHECK(error.context().rank == 3);
      CHECK_THAT(error.what(), ContainsSubstring("rank 3 aborted: the loss is NaN"));
    }
  }
  group.barrier();
}

RANK_TEST("a hierarchical group is destroyed at once though a rank never joins its collectives", "[hierarchical]", 2) {
  {
    const ProcessGroup hosts = on_hosts_of(group, 2);
    group.barrier();  // Otherwise rank 1 may still connect when rank 0 leaves.
    std::vector<torch::Tensor> tensors(3, torch::ones({5}));
    if (group.rank() == 0) {
      for (const torch::Tensor& tensor : tensors) static_cast<void>(hosts.all_reduce_async(tensor));
    }
    if (group.rank() == 1) group.barrier();  // Rank 0 has left the group by then.
  }
  if (group.rank() == 0) group.barrier();
}
