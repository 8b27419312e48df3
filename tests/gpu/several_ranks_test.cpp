// NCCL and DistributedDataParallel between several GPUs.
#include <torch/torch.h>

#include <ddpkit/ddpkit.h>

#include "gpu/gpu.h"
#include "gpu/models.h"
#include "support/ranks.h"

namespace {

using ddpkit::ProcessGroup, ddpkit::ReduceOp;
using gpu::on_gpus;

/// Returns the data that a rank sends: integers, so that sums over ranks are exact.
torch::Tensor part(const ProcessGroup& group, int rank, at::IntArrayRef sizes) {
  const std::int64_t count = c10::multiply_integers(sizes);
  return (torch::arange(count, torch::kFloat) * (rank + 1) + rank).remainder(1000).view(sizes).to(group.device());
}

torch::Tensor stacked(const ProcessGroup& group, at::IntArrayRef sizes) {
  std::vector<torch::Tensor> parts;
  for (int rank = 0; rank < group.world_size(); ++rank) parts.push_back(part(group, rank, sizes));
  return torch::stack(parts);
}

const std::vector<std::int64_t> kSizes = {1, 1000, 300001};

void check_equal(const torch::Tensor& found, const torch::Tensor& expected) {
  CHECK(torch::equal(found.cpu(), expected.cpu()));
}

/// Trains on samples `begin` to `end` of each global batch.
template <class Optimizer, class Forward>
void train(torch::nn::Sequential& net, Optimizer&& optimizer, std::int64_t begin, std::int64_t end, std::int64_t total,
           Forward&& forward) {
  for (int step = 0; step < 8; ++step) {
    torch::manual_seed(100 + step);
    const auto x = torch::randn({total, 12}, torch::kDouble).narrow(0, begin, end - begin);
    optimizer.zero_grad(step % 2 == 0);
    gpu::loss_of(forward(x.to(net->parameters()[0].device()))).backward();
    optimizer.step();
  }
}

torch::optim::SGD sgd(torch::nn::Sequential& net) {
  return torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
}

void check_training(ProcessGroup& group, const ddpkit::DistributedDataParallelOptions& options) {
  auto joint = gpu::net(), net = gpu::net();
  joint->to(group.device());
  net->to(group.device());
  const std::int64_t samples = 8, total = samples * group.world_size();
  train(joint, sgd(joint), 0, total, total, [&](const torch::Tensor& x) { return joint->forward(x); });
  ddpkit::DistributedDataParallel ddp(net, group, options);
  REQUIRE(ddp.reducer().buckets().size() > 2);
  train(net, sgd(net), samples * group.rank(), samples * (group.rank() + 1), total,
        [&](const torch::Tensor& x) { return ddp(x); });
  gpu::check_same(net->parameters(), joint->parameters());
}

void check_sharded_training(ProcessGroup& group) {
  auto joint = gpu::net(), net = gpu::net();
  joint->to(group.device());
  net->to(group.device());
  const std::int64_t samples = 8, total = samples * group.world_size();
  const torch::optim::AdamWOptions options(0.01);
  train(joint, ddpkit::optim::FusedAdamW(joint->parameters(), options), 0, total, total,
        [&](const torch::Tensor& x) { return joint->forward(x); });
  ddpkit::DistributedDataParallel ddp(net, group, gpu::small_buckets());
  ddpkit::optim::ShardedOptimizer<ddpkit::optim::FusedAdamW> sharded(ddp, options);
  REQUIRE(ddp.reducer().buckets().size() > 2);
  train(net, sharded, samples * group.rank(), samples * (group.rank() + 1), total,
        [&](const torch::Tensor& x) { return ddp(x); });
  gpu::check_same(net->parameters(), joint->parameters(), 1e-9);
  for (const torch::Tensor& parameter : net->parameters()) {
    const torch::Tensor all = group.all_gather(parameter.detach());
    for (int rank = 1; rank < group.world_size(); ++rank) CHECK(torch::equal(all[rank], all[0]));
  }
}

}  // namespace

TEST_CASE("all_reduce and broadcast between 3 GPUs", "[gpu]") {
  NEEDS_GPUS(3);
  on_gpus("all_reduce and broadcast between 3 GPUs", 3, [](ProcessGroup& group) {
    CHECK(group.device() == torch::Device(torch::kCUDA, static_cast<c10::DeviceIndex>(group.rank())));
    for (const std::int64_t size : kSizes) {
      const auto parts = stacked(group, {size});
      const auto reduced = [&](ReduceOp op) {
        auto tensor = part(group, group.rank(), {size});
        group.all_reduce(tensor, op);
        return tensor;
      };
      check_equal(reduced(ReduceOp::kSum), parts.sum(0));
      check_equal(reduced(ReduceOp::kMax), std::get<0>(parts.max(0)));
      check_equal(reduced(ReduceOp::kMin), std::get<0>(parts.min(0)));
      CHECK(torch::allclose(reduced(ReduceOp::kAvg), parts.mean(0)));
      for (int root = 0; root < group.world_size(); ++root) {
        auto tensor = part(group, group.rank(), {size});
        group.broadcast(tensor, root);
        check_equal(tensor, parts[root]);
      }
    }
    for (const auto type : {torch::kHalf, torch::kBFloat16, torch::kDouble, torch::kInt, torch::kLong, torch::kByte}) {
      auto tensor = torch::full({100}, group.rank() + 1, torch::TensorOptions(group.device()).dtype(type));
      group.all_reduce(tensor);
      check_equal(tensor, torch::full({100}, 6, type));
    }
  });
}

TEST_CASE("a rank's GPU is its current device, and its group refuses tensors of another GPU", "[gpu]") {
  NEEDS_GPUS(2);
  on_gpus("a rank's GPU is its current device, and its group refuses tensors of another GPU", 2,
          [](ProcessGroup& group) {
            CHECK(torch::ones({1}, torch::kCUDA).device() == group.device());
            const auto elsewhere = torch::ones({3}, torch::Device(torch::kCUDA, 1 - group.device().index()));
            CHECK_THROWS_WITH(group.all_reduce(elsewhere), ContainsSubstring("move the tensor there"));
            group.barrier();
          });
}

TEST_CASE("gathers, scatters and reductions to one of 3 GPUs", "[gpu]") {
  NEEDS_GPUS(3);
  on_gpus("gathers, scatters and reductions to one of 3 GPUs", 3, [](ProcessGroup& group) {
    const int ranks = group.world_size(), rank = group.rank();
    for (const std::int64_t size : kSizes) {
      const auto parts = stacked(group, {size});
      check_equal(group.all_gather(part(group, rank, {size})), parts);
      auto scattered = torch::empty({size}, group.device());
      group.reduce_scatter(scattered, part(group, rank, {ranks, size}));
      check_equal(scattered, stacked(group, {ranks, size}).sum(0)[rank]);
      for (int root = 0; root < ranks; ++root) {
        auto reduced = part(group, rank, {size});
        group.reduce(reduced, root);
        if (rank == root) check_equal(reduced, parts.sum(0));
        const auto gathered = group.gather(part(group, rank, {size}), root);
        if (rank == root) check_equal(gathered, parts);
        group.scatter(scattered, rank == root ? parts : torch::Tensor(), root);
        check_equal(scattered, parts[rank]);
      }
    }
  });
}

TEST_CASE("all_to_all, send and recv between 3 GPUs", "[gpu]") {
  NEEDS_GPUS(3);
  on_gpus("all_to_all, send and recv between 3 GPUs", 3, [](ProcessGroup& group) {
    const int ranks = group.world_size(), rank = group.rank();
    for (const std::int64_t size : kSizes) {
      auto output = torch::empty({ranks, size}, group.device());
      group.all_to_all(output, part(group, rank, {ranks, size}));
      check_equal(output, stacked(group, {ranks, size}).select(1, rank));
      auto received = torch::empty({size}, group.device());
      if (rank == 0) group.send(part(group, 0, {size}), 1);
      if (rank == 1) group.recv(received, 0);
      if (rank == 1) check_equal(received, part(group, 0, {size}));
    }
    // Rank a sends rank b (a + 1) * (b + 1) rows.
    std::vector<std::int64_t> sent, received;
    for (int other = 0; other < ranks; ++other) {
      sent.push_back((rank + 1) * (other + 1));
      received.push_back((other + 1) * (rank + 1));
    }
    auto output = torch::empty({6 * (rank + 1), 5}, group.device());
    group.all_to_all(output, torch::full({6 * (rank + 1), 5}, static_cast<float>(rank), group.device()), received,
                     sent);
    for (int other = 0, row = 0; other < ranks; ++other) {
      const auto rows = received[static_cast<std::size_t>(other)];
      CHECK((output.narrow(0, row, rows) == other).all().item<bool>());
      row += static_cast<int>(rows);
    }
    group.barrier();
    CHECK(group.all_gather_bytes(std::string(static_cast<std::size_t>(rank), 'x')) ==
          std::vector<std::string>{"", "x", "xx"});
  });
}

TEST_CASE("a part of 3 GPUs forms a group", "[gpu]") {
  NEEDS_GPUS(3);
  on_gpus("a part of 3 GPUs forms a group", 3, [](ProcessGroup& group) {
    const auto outer = group.split({0, 2});
    CHECK(outer.has_value() == (group.rank() != 1));
    auto tensor = torch::full({1000}, group.rank() + 1.0f, group.device());
    if (outer) outer->all_reduce(tensor);
    CHECK((tensor == (outer ? 4 : 2)).all().item<bool>());
    group.all_reduce(tensor);
    CHECK((tensor == 10).all().item<bool>());
  });
}

TEST_CASE("DistributedDataParallel on 2 GPUs equals one process on the joined batch", "[gpu]") {
  NEEDS_GPUS(2);
  on_gpus("DistributedDataParallel on 2 GPUs equals one process on the joined batch", 2,
          [](ProcessGroup& group) { check_training(group, gpu::small_buckets()); });
}

TEST_CASE("DistributedDataParallel on 3 GPUs equals one process on the joined batch", "[gpu]") {
  NEEDS_GPUS(3);
  on_gpus("DistributedDataParallel on 3 GPUs equals one process on the joined batch", 3, [](ProcessGroup& group) {
    for (const bool views : {false, true}) {
      auto options = gpu::small_buckets();
      options.gradient_as_bucket_view = views;
      check_training(group, options);
    }
  });
}

TEST_CASE("a sharded optimizer on 2 GPUs equals one process on the joined batch", "[gpu]") {
  NEEDS_GPUS(2);
  on_gpus("a sharded optimizer on 2 GPUs equals one process on the joined batch", 2, check_sharded_training);
}

TEST_CASE("a sharded optimizer on 3 GPUs equals one process on the joined batch", "[gpu]") {
  NEEDS_GPUS(3);
  on_gpus("a sharded optimizer on 3 GPUs equals one process on the joined batch", 3, check_sharded_training);
}

TEST_CASE("SyncBatchNorm on 2 GPUs sees the joined batch", "[gpu]") {
  NEEDS_GPUS(2);
  on_gpus("SyncBatchNorm on 2 GPUs sees the joined batch", 2, [](ProcessGroup& group) {
    torch::nn::BatchNorm1d plain(4);
    plain->to(group.device(), torch::kDouble);
    ddpkit::SyncBatchNorm synced(torch::nn::BatchNormOptions(4), group);
    synced->to(group.device(), torch::kDouble);
    torch::manual_seed(1);
    const auto batch = torch::randn({10, 4}, torch::kDouble).to(group.device());
    const auto joint = batch.clone().requires_grad_(),
               own = batch.narrow(0, 5 * group.rank(), 5).clone().requires_grad_();
    const auto expected = plain->forward(joint), found = synced->forward(own);
    CHECK(torch::allclose(found, expected.narrow(0, 5 * group.rank(), 5), 0, 1e-12));
    expected.pow(3).sum().backward();
    found.pow(3).sum().backward();
    CHECK(torch::allclose(own.grad(), joint.grad().narrow(0, 5 * group.rank(), 5), 0, 1e-10));
    CHECK(torch::allclose(synced->running_var, plain->running_var, 0, 1e-12));
  });
}

TEST_CASE("DistributedDataParallel on 4 GPUs equals one process on the joined batch", "[gpu]") {
  NEEDS_GPUS(4);
  on_gpus("DistributedDataParallel on 4 GPUs equals one process on the joined batch", 4,
          [](ProcessGroup& group) { check_training(group, gpu::small_buckets()); });
}

TEST_CASE("2 ranks on one GPU train over shared memory as over NCCL", "[gpu]") {
  NEEDS_GPU();
  ddpkit::testing::on_ranks("2 ranks on one GPU train over shared memory as over NCCL", 2,
                            [](ProcessGroup& group) { check_training(group, gpu::small_buckets()); },
                            {.backend = "shm", .device = torch::Device(torch::kCUDA, 0)});
}

TEST_CASE("an overflow on one of 2 GPUs skips the step on both", "[gpu]") {
  NEEDS_GPUS(2);
  on_gpus("an overflow on one of 2 GPUs skips the step on both", 2, [](ProcessGroup& group) {
    auto weight = torch::zeros({70000}, group.device()).requires_grad_(true);
    ddpkit::optim::FusedSGD optimizer({weight}, torch::optim::SGDOptions(1.0));
    ddpkit::optim::GradScaler scaler(group, {.init_scale = 8});
    const auto step = [&](bool overflows) {
      auto gradient = torch::full({70000}, 4.0f, group.device());
      if (overflows && group.rank() == 1) gradient[69999] = std::numeric_limits<float>::infinity();
      weight.mutable_grad() = gradient;
      const bool stepped = scaler.step(optimizer);
      scaler.update();
      return stepped;
    };
    CHECK_FALSE(step(true));
    CHECK(weight.detach().eq(0).all().item<bool>());
    CHECK(scaler.get_scale() == 4);
    CHECK(step(false));
    CHECK(weight.detach().eq(-1).all().item<bool>());
  });
}

TEST_CASE("a step of 2 GPUs cannot be captured while DDPKIT_DEBUG reads its gradients", "[gpu]") {
  NEEDS_GPUS(2);
  const auto body = [](ProcessGroup& group) {
    auto net = gpu::net();
    net->to(group.device());
    ddpkit::DistributedDataParallel ddp(net, group);
    ddpkit::optim::FusedSGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1), {.capturable = true});
    ddpkit::optim::GraphedStep step(group.device(), {&optimizer}, [&](const std::vector<torch::Tensor>& inputs) {
      optimizer.zero_grad();
      ddp(inputs[0]).pow(2).mean().backward();
      optimizer.step();
      return inputs;
    });
    const auto input = torch::ones({4, 12}, gpu::doubles()).to(group.device());
    const auto run = [&] {
      for (int call = 0; call < 20; ++call) step({input});
    };
    CHECK_THROWS_WITH(run(), ContainsSubstring("DDPKIT_DEBUG=detail reads each gradient on the host"));
  };
  on_gpus("a step of 2 GPUs cannot be captured while DDPKIT_DEBUG reads its gradients", 2, body,
          {{"DDPKIT_DEBUG", "detail"}});
}

TEST_CASE("float16 training with a GradScaler on 2 GPUs follows float32 training on the joined batch", "[gpu]") {
  NEEDS_GPUS(2);
  const auto body = [](ProcessGroup& group) {
    auto joint = gpu::net(), net = gpu::net();
    for (auto* each : {&joint, &net}) (*each)->to(group.device(), torch::kFloat);
    ddpkit::DistributedDataParallel ddp(net, group, gpu::small_buckets());
    const torch::optim::SGDOptions options(0.1);
    torch::optim::SGD joint_optimizer(joint->parameters(), options);
    ddpkit::optim::FusedSGD optimizer(net->parameters(), options);
    ddpkit::optim::GradScaler scaler(group, {.init_scale = 1 << 24});  // The first steps overflow.
    int steps = 0;
    for (int batch = 0; batch < 24; ++batch) {
      torch::manual_seed(100 + batch);
      const auto joined = torch::randn({8, 12}).to(group.device());
      optimizer.zero_grad();
      torch::Tensor loss;
      {
        const ddpkit::optim::Autocast autocast(group.device(), torch::kHalf);
        loss = ddp(joined.narrow(0, 4 * group.rank(), 4)).to(torch::kFloat).pow(2).mean();
      }
      scaler.scale(loss).backward();
      const bool stepped = scaler.step(optimizer);
      scaler.update();
      CHECK(group.all_gather_bytes(stepped ? "1" : "0") == std::vector<std::string>(2, stepped ? "1" : "0"));
      if (!stepped) continue;
      ++steps;
      joint_optimizer.zero_grad();
      joint->forward(joined).pow(2).mean().backward();
      joint_optimizer.step();
    }
    CHECK(steps > 10);
    CHECK(steps < 24);
    for (std::size_t i = 0; i < net->parameters().size(); ++i)
      CHECK(torch::allclose(net->parameters()[i], joint->parameters()[i], 0, 2e-3));
    const auto all = group.all_gather(net->parameters()[0].detach());
    CHECK(torch::equal(all[0], all[1]));
  };
  on_gpus("float16 training with a GradScaler on 2 GPUs follows float32 training on the joined batch", 2, body);
}
