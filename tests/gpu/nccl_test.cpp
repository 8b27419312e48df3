#include <torch/torch.h>

#include <ddpkit/ddpkit.h>

#include "gpu/gpu.h"
#include "support/captured_stderr.h"
#include "support/ranks.h"

namespace {

torch::nn::Sequential small_net() {
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Conv2d(3, 8, 3), torch::nn::BatchNorm2d(8), torch::nn::ReLU(),
                            torch::nn::Flatten(), torch::nn::Linear(8 * 6 * 6, 10));
  net->to(torch::kDouble);
  return net;
}

ddpkit::ProcessGroup world_of_one() {
  return ddpkit::init_process_group({.backend = "nccl", .environment = ddpkit::LaunchEnvironment{}});
}

}  // namespace

TEST_CASE("a GPU and nccl are chosen automatically", "[gpu]") {
  NEEDS_GPU();
  const auto group = ddpkit::init_process_group({.environment = ddpkit::LaunchEnvironment{}});
  CHECK(group.backend_name() == "nccl");
  CHECK(group.device() == torch::Device(torch::kCUDA, 0));
}

TEST_CASE("nccl collectives at world size 1", "[gpu]") {
  NEEDS_GPU();
  const auto group = world_of_one();
  const auto tensor = torch::randn({1000}, group.device());
  const auto before = tensor.clone();
  for (const auto op : {ddpkit::ReduceOp::kSum, ddpkit::ReduceOp::kAvg, ddpkit::ReduceOp::kMax})
    group.all_reduce(tensor, op);
  group.broadcast(tensor);
  CHECK(torch::equal(tensor, before));
  CHECK(torch::equal(group.all_gather(tensor)[0], before));
  CHECK(group.all_gather_bytes("gpu") == std::vector<std::string>{"gpu"});
  group.barrier();
}

TEST_CASE("an nccl group ends without a message from c10d", "[gpu]") {
  NEEDS_GPU();
  const std::string errors = ddpkit::testing::stderr_of([] {
    const auto group = world_of_one();
    const auto memory = group.allocate({1 << 20}, torch::kFloat).fill_(1);
    // More than the group tracks at once. The last ones are still running when the group is destroyed.
    for (int i = 0; i < 200; ++i) group.all_reduce(memory);
  });
  CHECK(errors == "");
}

TEST_CASE("a tensor of another device is refused by name", "[gpu]") {
  NEEDS_GPU();
  const auto group = world_of_one();
  const auto on_host = torch::ones({3}), on_gpu = on_host.to(group.device());
  const auto refuses = ContainsSubstring("the tensor is on cpu, but this group's nccl works on cuda:0");
  CHECK_THROWS_WITH(group.all_reduce(on_host), refuses);
  CHECK_THROWS_WITH(group.broadcast(on_host), refuses);
  CHECK_THROWS_WITH(group.all_gather_into(on_host, on_gpu), refuses);
  CHECK_THROWS_WITH(group.reduce_scatter(on_host, on_gpu), refuses);
  CHECK_THROWS_WITH(group.all_to_all(on_host, on_gpu), refuses);
  group.all_reduce(on_gpu);
}

TEST_CASE("an output of another data type than the input is refused", "[gpu]") {
  NEEDS_GPU();
  const auto group = world_of_one();
  const auto input = torch::arange(4, group.device()).to(torch::kFloat), output = input.to(torch::kInt);
  const auto refuses = ContainsSubstring("the input is of type Float, but the output of type Int");
  CHECK_THROWS_WITH(group.all_to_all(output, input), refuses);
  CHECK_THROWS_WITH(group.all_gather_into(output, input), refuses);
  CHECK_THROWS_WITH(group.reduce_scatter(output, input), refuses);
  CHECK_THROWS_WITH(group.scatter(output, input.view({1, 4})), refuses);
  group.all_to_all(output, input.to(torch::kInt));
}

TEST_CASE("DistributedDataParallel on one GPU gives the weights of plain training", "[gpu]") {
  NEEDS_GPU();
  const auto group = world_of_one();
  auto plain = small_net(), wrapped = small_net();
  plain->to(group.device());
  wrapped->to(group.device());
  ddpkit::DistributedDataParallel ddp(wrapped, group, {.bucket_cap_mb = 0.001, .first_bucket_cap_mb = 0.001});
  REQUIRE(ddp.reducer().buckets().size() > 1);
  torch::optim::AdamW plain_optimizer(plain->parameters(), 1e-2), optimizer(wrapped->parameters(), 1e-2);
  for (int step = 0; step < 20; ++step) {
    const auto x = torch::randn({16, 3, 8, 8}, torch::TensorOptions(torch::kDouble).device(group.device()));
    const auto y = torch::randint(0, 10, {16}, torch::TensorOptions(torch::kLong).device(group.device()));
    plain_optimizer.zero_grad();
    torch::cross_entropy_loss(plain->forward(x), y).backward();
    plain_optimizer.step();
    optimizer.zero_grad(step % 2 == 0);
    torch::cross_entropy_loss(ddp(x), y).backward();
    optimizer.step();
  }
  for (std::size_t i = 0; i < plain->parameters().size(); ++i)
    CHECK(torch::allclose(plain->parameters()[i], wrapped->parameters()[i], 0, 1e-10));
}

TEST_CASE("more ranks than GPUs are refused with both numbers", "[gpu]") {
  NEEDS_GPU();
  ddpkit::LaunchEnvironment environment;
  environment.rank = environment.local_rank = 63;
  environment.world_size = environment.local_world_size = 64;
  CHECK_THROWS_WITH(ddpkit::init_process_group({.backend = "nccl", .environment = environment}),
                    ContainsSubstring("rank 63"));
}

TEST_CASE("nccl without a GPU is refused with a sentence", "[gpu][no_gpu]") {
  if (torch::cuda::is_available()) DDPKIT_SKIP("this host has a GPU");
  CHECK_THROWS_AS(world_of_one(), ddpkit::InvalidArgument);
}
