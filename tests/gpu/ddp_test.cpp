// World size 1 runs the same code as more ranks: hooks, buckets, NCCL, streams.
#include <torch/torch.h>

#include <ddpkit/ddpkit.h>

#include "gpu/gpu.h"
#include "gpu/models.h"

namespace {

using gpu::batch, gpu::loss_of;

/// Weights after some steps of DistributedDataParallel, and of the unwrapped module.
struct Trained {
  torch::nn::Sequential plain = gpu::net(), wrapped = gpu::net();
  ddpkit::DistributedDataParallel<torch::nn::SequentialImpl> ddp;
  torch::optim::SGD plain_optimizer{plain->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)};
  torch::optim::SGD optimizer{wrapped->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)};

  Trained(const ddpkit::ProcessGroup& group, const ddpkit::DistributedDataParallelOptions& options)
      : ddp(wrapped, group, options) {}

  void step(int number, bool set_to_none = true) {
    plain_optimizer.zero_grad(set_to_none);
    loss_of(plain->forward(batch(number, 16))).backward();
    plain_optimizer.step();
    optimizer.zero_grad(set_to_none);
    loss_of(ddp(batch(number, 16))).backward();
    optimizer.step();
  }
  void check(double tolerance = 1e-12) const { gpu::check_same(wrapped->parameters(), plain->parameters(), tolerance); }
};

struct PartlyUsed : torch::nn::Module {
  PartlyUsed() {
    register_module("net", net);
    register_module("unused", unused);
    to(torch::Device(torch::kCUDA, 0), torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x) { return net->forward(x); }
  torch::nn::Sequential net = gpu::net();
  torch::nn::Linear unused{40, 40};
};

}  // namespace

TEST_CASE("gradients as views of buckets, kept or not, train as the bare module does", "[gpu]") {
  NEEDS_GPU();
  const auto group = gpu::world_of_one();
  for (const bool views : {false, true}) {
    auto options = gpu::small_buckets();
    options.gradient_as_bucket_view = views;
    Trained trained(group, options);
    REQUIRE(trained.ddp.reducer().buckets().size() > 2);
    for (int step = 0; step < 12; ++step) trained.step(step, step % 3 != 0);
    trained.check();
    CHECK(trained.ddp.stats().steps == 12);
  }
}

TEST_CASE("gradients accumulate on the GPU within no_sync", "[gpu]") {
  NEEDS_GPU();
  Trained trained(gpu::world_of_one(), gpu::small_buckets());
  for (int step = 0; step < 4; ++step) {
    trained.optimizer.zero_grad();
    trained.plain_optimizer.zero_grad();
    loss_of(trained.plain->forward(batch(2 * step, 8))).backward();
    loss_of(trained.plain->forward(batch(2 * step + 1, 8))).backward();
    {
      const auto accumulating = trained.ddp.no_sync();
      loss_of(trained.ddp(batch(2 * step, 8))).backward();
    }
    loss_of(trained.ddp(batch(2 * step + 1, 8))).backward();
    trained.plain_optimizer.step();
    trained.optimizer.step();
  }
  trained.check();
  CHECK(trained.ddp.stats().steps == 4);
}

TEST_CASE("communication hooks work on the GPU's streams", "[gpu]") {
  NEEDS_GPU();
  const auto group = gpu::world_of_one();
  const auto with_hook = [&](const ddpkit::CommHook& hook, double tolerance) {
    Trained trained(group, gpu::small_buckets());
    trained.ddp.register_comm_hook(hook);
    for (int step = 0; step < 6; ++step) trained.step(step);
    trained.check(tolerance);
  };
  with_hook(ddpkit::comm_hooks::all_reduce(group), 1e-12);
  with_hook(ddpkit::comm_hooks::fp16_compress(group), 1e-2);
  with_hook(ddpkit::comm_hooks::bf16_compress(group), 1e-1);
  // At full rank, PowerSGD is exact.
  with_hook(ddpkit::comm_hooks::PowerSGD(
                group, {.matrix_approximation_rank = 40, .start_powerSGD_iter = 2, .min_compression_rate = 0}),
            1e-6);
}

TEST_CASE("activation checkpoints on the GPU repeat its random numbers", "[gpu]") {
  NEEDS_GPU();
  const auto group = gpu::world_of_one();
  const auto trained = [&](bool checkpointed) {
    auto net = gpu::net();
    ddpkit::DistributedDataParallel ddp(net, group, gpu::small_buckets());
    torch::cuda::manual_seed(5);
    const auto block = [](const torch::Tensor& x) { return torch::dropout(x.sin(), 0.5, true).exp(); };
    for (int step = 0; step < 2; ++step) {
      const auto y = ddp(batch(step, 8));
      loss_of(checkpointed ? ddpkit::activation_checkpoint(block, y) : block(y)).backward();
    }
    std::vector<torch::Tensor> results{torch::rand({4}, gpu::doubles())};
    for (const auto& parameter : net->parameters()) results.push_back(parameter.grad());
    return results;
  };
  const auto expected = trained(false), found = trained(true);
  for (std::size_t i = 0; i < expected.size(); ++i) CHECK(torch::equal(found[i], expected[i]));
}

TEST_CASE("parameters without a gradient are supported on the GPU", "[gpu]") {
  NEEDS_GPU();
  auto options = gpu::small_buckets();
  options.find_unused_parameters = true;
  const auto partly = std::make_shared<PartlyUsed>();
  ddpkit::DistributedDataParallel ddp(partly, gpu::world_of_one(), options);
  auto reference = gpu::net();
  for (int step = 0; step < 3; ++step) {
    partly->zero_grad();
    reference->zero_grad();
    loss_of(ddp(batch(step, 8))).backward();
    loss_of(reference->forward(batch(step, 8))).backward();
    for (std::size_t i = 0; i < reference->parameters().size(); ++i)
      CHECK(torch::allclose(partly->net->parameters()[i].grad(), reference->parameters()[i].grad(), 0, 1e-12));
    CHECK_FALSE(partly->unused->weight.grad().defined());
  }
}

TEST_CASE("memory of an nccl group can be reduced, and outlives the group", "[gpu]") {
  NEEDS_GPU();
  torch::Tensor memory;
  {
    const auto group = gpu::world_of_one();
    memory = group.allocate({3, 1000}, torch::kFloat);
    CHECK(memory.sizes() == torch::IntArrayRef({3, 1000}));
    CHECK(memory.device() == group.device());
    CHECK(memory.is_contiguous());
    memory.fill_(2);
    group.all_reduce(memory, ddpkit::ReduceOp::kAvg);
    CHECK((memory == 2).all().item<bool>());
    CHECK(group.allocate({0}, torch::kFloat).numel() == 0);
  }
  CHECK((memory + 1 == 3).all().item<bool>());
}
