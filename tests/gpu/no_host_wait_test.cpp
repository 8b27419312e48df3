// The host must be able to run ahead of the GPU.
#include <c10/cuda/CUDAFunctions.h>
#include <torch/torch.h>

#include <ddpkit/ddpkit.h>

#include "gpu/gpu.h"
#include "gpu/models.h"
#include "support/ranks.h"

namespace {

/// Within its scope, any wait of the host for the device throws.
struct NoHostWait {
  NoHostWait() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR); }
  ~NoHostWait() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED); }
};

struct Hidden {
  torch::Tensor tensor;
};

struct HidesOutputImpl : torch::nn::Module {
  HidesOutputImpl() { register_module("net", net); }
  Hidden forward(const torch::Tensor& x) { return {net->forward(x)}; }
  torch::nn::Sequential net = gpu::net();
};

template <class Wrapper>
void train(Wrapper& ddp, torch::optim::Optimizer& optimizer) {
  const auto x = gpu::batch(0, 16).to(ddp.module().parameters()[0].device());
  const auto step = [&] {
    optimizer.zero_grad();
    gpu::loss_of(ddp(x)).backward();
    optimizer.step();
  };
  for (int warm_up = 0; warm_up < 3; ++warm_up) step();  // Creates communicators, memory and the order of buckets.
  const NoHostWait no_wait;
  for (int steps = 0; steps < 3; ++steps) step();
}

}  // namespace

TEST_CASE("the guard of these tests sees the host wait", "[gpu]") {
  NEEDS_GPU();
  const auto x = torch::ones({1}, torch::kCUDA);
  const NoHostWait no_wait;
  CHECK_THROWS(x.item<float>());
}

TEST_CASE("a step of DistributedDataParallel does not make the host wait", "[gpu]") {
  NEEDS_GPU();
  const auto group = gpu::world_of_one();
  for (const bool views : {false, true}) {
    auto net = gpu::net();
    auto options = gpu::small_buckets();
    options.gradient_as_bucket_view = views;
    ddpkit::DistributedDataParallel ddp(net, group, options);
    ddpkit::optim::FusedAdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
    CHECK_NOTHROW(train(ddp, optimizer));
  }
}

TEST_CASE("a step with find_unused_parameters that uses all parameters does not make the host wait", "[gpu]") {
  NEEDS_GPU();
  auto net = gpu::net();
  auto options = gpu::small_buckets();
  options.find_unused_parameters = true;
  ddpkit::DistributedDataParallel ddp(net, gpu::world_of_one(), options);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  CHECK_NOTHROW(train(ddp, optimizer));
}

TEST_CASE("a step whose output hides its tensors does not make the host wait", "[gpu]") {
  NEEDS_GPU();
  const auto net = std::make_shared<HidesOutputImpl>();
  net->to(torch::Device(torch::kCUDA, 0), torch::kDouble);
  ddpkit::DistributedDataParallel ddp(net, gpu::world_of_one(), gpu::small_buckets());
  const auto x = gpu::batch(0, 16);
  const auto step = [&] { gpu::loss_of(ddp(x).tensor).backward(); };
  for (int warm_up = 0; warm_up < 3; ++warm_up) step();
  const NoHostWait no_wait;
  CHECK_NOTHROW(step());
}

TEST_CASE("compressing hooks do not make the host wait", "[gpu]") {
  NEEDS_GPU();
  const auto group = gpu::world_of_one();
  const std::vector<ddpkit::CommHook> hooks{
      ddpkit::comm_hooks::bf16_compress(group),
      // One column: no QR, and the host draws a new Q each time.
      ddpkit::comm_hooks::PowerSGD(
          group,
          {.matrix_approximation_rank = 1, .start_powerSGD_iter = 0, .min_compression_rate = 0, .warm_start = false})};
  for (const auto& hook : hooks) {
    auto net = gpu::net();
    ddpkit::DistributedDataParallel ddp(net, group, gpu::small_buckets());
    ddp.register_comm_hook(hook);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    CHECK_NOTHROW(train(ddp, optimizer));
  }
}

TEST_CASE("a step that broadcasts buffers does not make the host wait", "[gpu]") {
  NEEDS_GPUS(2);
  const auto body = [](ddpkit::ProcessGroup& group) {
    auto net = gpu::net();
    net->push_back(torch::nn::BatchNorm1d(3));
    net->to(group.device(), torch::kDouble);
    ddpkit::DistributedDataParallel ddp(net, group, gpu::small_buckets());
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    CHECK_NOTHROW(train(ddp, optimizer));
  };
  ddpkit::testing::on_ranks("a step that broadcasts buffers does not make the host wait", 2, body,
                            {.backend = "nccl", .device = torch::kCUDA});
}

TEST_CASE("a step of FullyShardedDataParallel does not make the host wait", "[gpu][fsdp]") {
  NEEDS_GPUS(2);
  const auto body = [](ddpkit::ProcessGroup& group) {
    auto net = gpu::net();
    net->to(group.device());
    ddpkit::FullyShardedDataParallel fsdp(net, group, {.min_unit_mb = 0});
    ddpkit::optim::ShardedOptimizer<ddpkit::optim::FusedAdamW> optimizer(fsdp, torch::optim::AdamWOptions(0.01));
    CHECK_NOTHROW(train(fsdp, optimizer));
  };
  ddpkit::testing::on_ranks("a step of FullyShardedDataParallel does not make the host wait", 2, body,
                            {.backend = "nccl", .device = torch::kCUDA});
}

TEST_CASE("the start of a staged collective does not make the host wait", "[gpu][ranks]") {
  NEEDS_GPU();
  const auto body = [](ddpkit::ProcessGroup& group) {
    const auto tensor = torch::full({1000}, 1, group.device());
    group.all_reduce(tensor);
    c10::cuda::device_synchronize();
    ddpkit::Work work;
    {
      const NoHostWait no_wait;
      work = group.all_reduce_async(tensor);
    }
    work.wait();
    CHECK((tensor == 4).all().item<bool>());
  };
  ddpkit::testing::on_ranks("the start of a staged collective does not make the host wait", 2, body,
                            {.device = at::Device(at::kCUDA, 0)});
}
