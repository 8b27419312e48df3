// A kernel that sleeps on the device precedes each collective, so that a missing wait between streams always fails the
// test.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <chrono>
#include <thread>

#include <ddpkit/ddpkit.h>

#include "gpu/gpu.h"

namespace {

constexpr std::int64_t kSleepCycles = 200'000'000;  // About 0.1 s.

/// Passes gradients on after a long sleep on the device.
struct SlowGradient : torch::autograd::Function<SlowGradient> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list grads) {
    at::cuda::sleep(kSleepCycles);
    return {grads[0] * 2};
  }
};

}  // namespace

TEST_CASE("all_reduce waits for the kernels before it, and its reader for all_reduce", "[gpu]") {
  NEEDS_GPU();
  const auto group = ddpkit::init_process_group({.backend = "nccl", .environment = ddpkit::LaunchEnvironment{}});
  const auto tensor = torch::zeros({1 << 20}, group.device());
  group.all_reduce(tensor);  // Creates the communicator.
  for (int round = 0; round < 3; ++round) {
    at::cuda::sleep(kSleepCycles);
    tensor.fill_(round + 1);
    ddpkit::Work work = group.all_reduce_async(tensor, ddpkit::ReduceOp::kAvg);
    work.wait();
    CHECK((tensor == round + 1).all().item<bool>());
  }
}

TEST_CASE("gradients that come late on the device are reduced all the same", "[gpu]") {
  NEEDS_GPU();
  const auto group = ddpkit::init_process_group({.backend = "nccl", .environment = ddpkit::LaunchEnvironment{}});
  torch::nn::Linear first(64, 64), second(64, 1);
  torch::nn::Sequential net(first, second);
  net->to(group.device());
  ddpkit::DistributedDataParallel ddp(net, group, {.bucket_cap_mb = 0.001, .first_bucket_cap_mb = 0.001});
  const auto x = torch::ones({8, 64}, group.device());
  const auto gradients = [&](bool slow) {
    net->zero_grad();
    const auto features = ddp.module().forward(x);
    (slow ? SlowGradient::apply(features) : features * 2).sum().backward();
    return first->weight.grad().clone();
  };
  const auto expected = gradients(false);
  // The host is far ahead of the device: the copies into the buckets and the reductions are only queued.
  CHECK(torch::equal(gradients(true), expected));
}

TEST_CASE("gradients of one bucket on two streams are reduced when both are ready", "[gpu]") {
  NEEDS_GPU();
  const auto group = ddpkit::init_process_group({.backend = "nccl", .environment = ddpkit::LaunchEnvironment{}});
  const auto side = c10::cuda::getStreamFromPool();
  torch::nn::Linear first(64, 64), second(64, 64);
  torch::nn::Sequential net(first, second);
  net->to(group.device());
  // Autograd creates the second layer's accumulators on the side stream. Keeping them makes their hooks run there.
  std::vector<decltype(torch::autograd::impl::grad_accumulator({}))> kept;
  {
    const c10::cuda::CUDAStreamGuard guard(side);
    for (const auto& parameter : second->parameters())
      kept.push_back(torch::autograd::impl::grad_accumulator(parameter));
  }
  ddpkit::DistributedDataParallel ddp(net, group);
  REQUIRE(ddp.reducer().buckets().size() == 1);
  const auto x = torch::ones({8, 64}, group.device());
  const auto gradients = [&](bool slow) {
    // If a gradient exists, autograd adds to it on the accumulator's stream.
    for (const auto& parameter : net->parameters()) parameter.mutable_grad() = torch::zeros_like(parameter);
    const auto features = first->forward(x);
    auto output = second->forward(features);
    if (slow) {
      output = SlowGradient::apply(output);
      const c10::cuda::CUDAStreamGuard guard(side);
      at::cuda::sleep(kSleepCycles);
    } else {
      output = output * 2;
    }
    output.sum().backward();
    std::vector<torch::Tensor> copies;
    for (const auto& parameter : net->parameters()) copies.push_back(parameter.grad().clone());
    return copies;
  };
  const auto expected = gradients(false);
  for (int round = 0; round < 2; ++round) {
    const auto late = gradients(true);
    for (std::size_t i = 0; i < late.size(); ++i) CHECK(torch::equal(late[i], expected[i]));
  }
}

TEST_CASE("a collective in progress does not disturb a capture", "[gpu]") {
  NEEDS_GPU();
  const auto group = ddpkit::init_process_group({.backend = "nccl", .environment = ddpkit::LaunchEnvironment{}});
  const auto tensor = torch::ones({1 << 20}, group.device()), x = torch::ones({10}, group.device());
  group.all_reduce(tensor);
  c10::cuda::device_synchronize();
  at::cuda::sleep(kSleepCycles);
  group.all_reduce(tensor);  // The group's threads ask the device whether it has ended.
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  const auto doubled = x * 2;
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  graph.capture_end();
  graph.replay();
  CHECK((doubled == 2).all().item<bool>());
}

TEST_CASE("training on another stream than the model was wrapped on", "[gpu]") {
  NEEDS_GPU();
  const auto group = ddpkit::init_process_group({.backend = "nccl", .environment = ddpkit::LaunchEnvironment{}});
  torch::nn::Sequential net(torch::nn::Linear(64, 64), torch::nn::Linear(64, 1));
  net->to(group.device());
  ddpkit::DistributedDataParallel ddp(net, group, {.bucket_cap_mb = 0.001, .first_bucket_cap_mb = 0.001});
  const auto x = torch::ones({8, 64}, group.device());
  ddp(x).sum().backward();
  const auto expected = net->parameters()[0].grad().clone();
  c10::cuda::device_synchronize();
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  for (int round = 0; round < 3; ++round) {
    net->zero_grad();
    const auto features = ddp(x);
    SlowGradient::apply(features * 0.5).sum().backward();
    CHECK(torch::equal(net->parameters()[0].grad(), expected));
  }
}

TEST_CASE("a backward on another stream fills a bucket after the last gradients were copied out of it", "[gpu]") {
  NEEDS_GPU();
  const auto group = ddpkit::init_process_group({.backend = "nccl", .environment = ddpkit::LaunchEnvironment{}});
  torch::nn::Sequential net(torch::nn::Linear(64, 64));
  net->to(group.device());
  ddpkit::DistributedDataParallel ddp(net, group);
  ddp.register_comm_hook([](ddpkit::GradBucket&) {
    return ddpkit::BucketReduction{.finish = [] {
      at::cuda::sleep(kSleepCycles);  // The copies out of the bucket follow.
      return torch::Tensor();
    }};
  });
  const auto gradient_of = [&](double factor, c10::cuda::CUDAStream stream) {
    const c10::cuda::CUDAStreamGuard guard(stream);
    ddp(torch::full({8, 64}, factor, group.device())).sum().backward();
    const auto gradient = net->parameters()[0].grad();
    net->zero_grad();  // The next backward is on another stream.
    return gradient;
  };
  const auto one = c10::cuda::getStreamFromPool(), other = c10::cuda::getStreamFromPool();
  for (int round = 0; round < 3; ++round) {
    const auto first = gradient_of(1, one), second = gradient_of(2, other);
    c10::cuda::device_synchronize();
    CHECK((first == 8).all().item<bool>());
    CHECK((second == 16).all().item<bool>());
  }
}
