// Memory that the host has released may still be in use on a stream. Another tensor must not receive it before. On
// virtual GPUs, a program that breaks this rule ends at the next allocation.
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <utility>

#include <ddpkit/ddpkit.h>

#include "gpu/gpu.h"
#include "gpu/models.h"

namespace {

using c10::cuda::CUDAStream, c10::cuda::CUDAStreamGuard;
using Tensors = std::vector<torch::Tensor>;

constexpr std::int64_t kBusyCycles = 40'000'000;  // About 20 ms.
constexpr std::int64_t kWidth = 64;

/// Later work of `waiter` follows the work queued so far on `of`.
void order(const CUDAStream& waiter, const CUDAStream& of) {
  c10::Event reached(c10::kCUDA);
  reached.record(of.unwrap());
  reached.block(waiter.unwrap());
}

CUDAStream current() { return c10::cuda::getCurrentCUDAStream(); }

/// One bucket, whose memory a stream other than the current one uses.
struct OneBucket {
  explicit OneBucket(ddpkit::ProcessGroup its_group = gpu::world_of_one()) : group(std::move(its_group)) {
    net->to(group.device());
    ddp.emplace(net, group, ddpkit::DistributedDataParallelOptions{});
  }
  torch::Tensor output() { return (*ddp)(torch::ones({8, kWidth}, group.device())); }
  /// Allocates as the bucket was allocated: the sizes are equal.
  torch::Tensor same_memory() const { return group.allocate({kWidth * kWidth + kWidth}, torch::kFloat).zero_(); }

  ddpkit::ProcessGroup group;
  torch::nn::Linear net{kWidth, kWidth};
  std::optional<ddpkit::DistributedDataParallel<torch::nn::LinearImpl>> ddp;
};

/// The hook of a bucket; the copies out of the bucket wait for a sleep.
ddpkit::BucketReduction sleeps(ddpkit::GradBucket&) {
  return {.finish = [] {
    at::cuda::sleep(kBusyCycles);
    return torch::Tensor();
  }};
}

/// A hook that multiplies the bucket by 4.
ddpkit::BucketReduction scales(ddpkit::GradBucket& bucket) {
  return {.finish = [buffer = bucket.buffer, scaled = bucket.buffer * 4] {
    at::cuda::sleep(kBusyCycles);
    buffer.copy_(scaled);
    return torch::Tensor();
  }};
}

}  // namespace

TEST_CASE("buckets that were rebuilt or destroyed keep their memory while a stream uses it", "[gpu]") {
  NEEDS_GPU();
  for (const bool rebuilt : {true, false}) {
    OneBucket one;
    one.ddp->register_comm_hook(sleeps);
    if (!rebuilt) one.output().sum().backward();  // Rebuilds the buckets at its end, on this stream.
    one.net->zero_grad();
    const CUDAStream side = c10::cuda::getStreamFromPool();
    order(side, current());
    {
      const CUDAStreamGuard guard(side);
      one.output().sum().backward();
    }
    if (!rebuilt) one.ddp.reset();
    const auto reused = one.same_memory(), also_reused = one.same_memory();
    c10::cuda::device_synchronize();
    CHECK((one.net->weight.grad() == 8).all().item<bool>());
  }
}

TEST_CASE("buckets of a backward that threw keep their memory while a stream uses it", "[gpu]") {
  NEEDS_GPU();
  // The abort of an nccl group waits for the device, and may come before the memory is reused.
  OneBucket one(ddpkit::init_process_group(
      {.backend = "shm", .device = torch::Device(torch::kCUDA, 0), .environment = ddpkit::LaunchEnvironment{}}));
  one.ddp->register_comm_hook(
      [](ddpkit::GradBucket&) -> ddpkit::BucketReduction { throw std::runtime_error("no such luck"); });
  const CUDAStream side = c10::cuda::getStreamFromPool();
  order(side, current());
  {
    const CUDAStreamGuard guard(side);
    const auto output = one.output();
    at::cuda::sleep(kBusyCycles);
    CHECK_THROWS(output.sum().backward());
  }
  one.ddp.reset();
  const auto reused = one.same_memory(), also_reused = one.same_memory();
  CHECK((reused == 0).all().item<bool>());
}

TEST_CASE("buckets made for a hook are zeroed before another stream fills them", "[gpu]") {
  NEEDS_GPU();
  OneBucket one;
  const CUDAStream side = c10::cuda::getStreamFromPool();
  order(side, current());
  const auto backward = [&] {
    const CUDAStreamGuard guard(side);
    one.net->zero_grad();
    one.output().sum().backward();
    return one.net->weight.grad().clone();
  };
  backward();
  c10::cuda::device_synchronize();
  at::cuda::sleep(kBusyCycles);
  one.ddp->register_comm_hook(ddpkit::comm_hooks::all_reduce(one.group));
  const auto gradient = backward();
  c10::cuda::device_synchronize();
  CHECK((gradient == 8).all().item<bool>());
}

TEST_CASE("a backward on another stream than its forward pass", "[gpu]") {
  NEEDS_GPU();
  for (const bool with_hook : {false, true}) {
    OneBucket one;
    if (with_hook) one.ddp->register_comm_hook(scales);
    one.output().sum().backward();  // Rebuilds the buckets at its end, on this stream.
    const CUDAStream side = c10::cuda::getStreamFromPool(), third = c10::cuda::getStreamFromPool();
    order(third, current());
    Tensors copies;
    for (int round = 0; round < 3; ++round) {
      one.net->zero_grad();
      torch::Tensor output;
      {
        const CUDAStreamGuard guard(side);
        order(side, third);
        output = one.output();
        at::cuda::sleep(kBusyCycles);
        output = output * 2;
      }
      {
        const CUDAStreamGuard guard(third);
        order(third, side);
        output.sum().backward();
        copies.push_back(one.net->weight.grad().clone());
      }
      // The hook's tensors were allocated on this stream.
      const CUDAStreamGuard guard(side);
      for (int i = 0; i < 3; ++i) static_cast<void>(torch::zeros({kWidth * kWidth + kWidth}, one.group.device()));
    }
    one.ddp.reset();
    const auto reused = one.same_memory(), also_reused = one.same_memory();
    c10::cuda::device_synchronize();
    for (const auto& copy : copies) CHECK((copy == (with_hook ? 64 : 16)).all().item<bool>());
  }
}

TEST_CASE("shards of gradients keep their memory while the optimizer's stream uses it", "[gpu]") {
  NEEDS_GPU();
  OneBucket one;
  ddpkit::optim::ShardedOptimizer<ddpkit::optim::FusedSGD> optimizer(*one.ddp, torch::optim::SGDOptions(1));
  const CUDAStream side = c10::cuda::getStreamFromPool();
  const auto before = one.net->weight.detach().clone();
  torch::Tensor output;
  {
    order(side, current());
    const CUDAStreamGuard guard(side);
    output = one.output().sum();
  }
  order(current(), side);
  output.backward();
  at::cuda::sleep(kBusyCycles);
  optimizer.step();  // Releases the shard. Its memory was allocated on the other stream.
  {
    const CUDAStreamGuard guard(side);
    std::vector<torch::Tensor> others;  // Kept: the stream has several blocks of this size.
    for (int i = 0; i < 3; ++i) others.push_back(torch::zeros({kWidth * kWidth + kWidth}, one.group.device()));
  }
  CHECK(torch::allclose(one.net->weight, before - 8));
}

TEST_CASE("gradients of a sharded bucket keep their memory until they are copied", "[gpu]") {
  NEEDS_GPU();
  const auto group = gpu::world_of_one();
  const CUDAStream side = c10::cuda::getStreamFromPool();
  torch::nn::Linear first(kWidth, kWidth), second(kWidth, kWidth);
  torch::nn::Sequential net(first, second);
  net->to(group.device());
  c10::cuda::device_synchronize();
  // Autograd creates the second layer's accumulators on the side stream. Keeping them makes their hooks run there.
  std::vector<decltype(torch::autograd::impl::grad_accumulator({}))> kept;
  {
    const CUDAStreamGuard guard(side);
    for (const auto& parameter : second->parameters())
      kept.push_back(torch::autograd::impl::grad_accumulator(parameter));
  }
  ddpkit::DistributedDataParallel ddp(net, group);
  ddpkit::optim::ShardedOptimizer<ddpkit::optim::FusedSGD> optimizer(ddp, torch::optim::SGDOptions(1));
  const auto x = torch::ones({8, kWidth}, group.device());
  {
    // If a gradient exists, autograd adds to it on the accumulator's stream.
    const CUDAStreamGuard guard(side);
    order(side, current());
    for (const auto& parameter : second->parameters()) parameter.mutable_grad() = torch::zeros_like(parameter);
  }
  const auto features = first->forward(x);
  const auto before = second->bias.detach().clone();
  const auto output = second->forward(features);
  at::cuda::sleep(kBusyCycles);
  output.sum().backward();
  {
    const CUDAStreamGuard guard(side);
    for (int i = 0; i < 3; ++i) {
      static_cast<void>(torch::zeros({kWidth, kWidth}, group.device()));
      static_cast<void>(torch::zeros({kWidth}, group.device()));
    }
  }
  optimizer.step();
  CHECK(torch::allclose(second->bias, before - 8));
}

TEST_CASE("inputs and outputs of a GraphedStep keep their memory while a stream uses it", "[gpu]") {
  NEEDS_GPU();
  std::optional<CUDAStream> inside;
  ddpkit::optim::GraphedStep step(torch::kCUDA, {},
                                  [&](const Tensors& inputs) {
                                    inside = current();
                                    at::cuda::sleep(kBusyCycles);
                                    return Tensors{inputs[0] * 2};
                                  },
                                  {.warmup_iterations = 3});
  const CUDAStream loader = c10::cuda::getStreamFromPool();
  for (int call = 0; call < 6; ++call) {
    torch::Tensor input;
    {
      const CUDAStreamGuard guard(loader);
      input = torch::full({kWidth, kWidth}, call, torch::kCUDA);
    }
    order(current(), loader);
    auto output = step({std::exchange(input, {})})[0];
    {
      // The loader does not wait for the step.
      const CUDAStreamGuard guard(loader);
      static_cast<void>(torch::full({kWidth, kWidth}, -1, torch::kCUDA));
    }
    at::cuda::sleep(kBusyCycles);
    const auto copy = output.clone();
    output = torch::Tensor();
    {
      // The pool has few streams: other work may use the stream of the step.
      const CUDAStreamGuard guard(*inside);
      static_cast<void>(torch::full({kWidth, kWidth}, -1, torch::kCUDA));
    }
    CHECK((copy == 2 * call).all().item<bool>());
  }
}
