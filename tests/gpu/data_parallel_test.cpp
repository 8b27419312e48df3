// Several replicas on one GPU, which is given several times.
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <ddpkit/ddpkit.h>

#include "gpu/gpu.h"
#include "gpu/models.h"

namespace {

using gpu::batch, gpu::loss_of;
using Batch = torch::data::Example<>;

std::vector<c10::Device> twice() { return {2, c10::Device(c10::kCUDA, 0)}; }

ddpkit::DataParallelOptions two_replicas() {
  return {.devices = twice(), .bucket_cap_mb = 0.01, .first_bucket_cap_mb = 0.001};
}

torch::Tensor target_for(const torch::Tensor& x) { return x.narrow(1, 0, 3) * 2; }

torch::Tensor loss(torch::nn::SequentialImpl& net, const Batch& part) {
  return torch::mse_loss(net.forward(part.data), part.target);
}

}  // namespace

TEST_CASE("train_step of two replicas on one GPU trains as the bare module does", "[gpu]") {
  NEEDS_GPU();
  auto ours = gpu::net(), reference = gpu::net();
  ddpkit::DataParallel dp(ours, two_replicas());
  CHECK(dp.devices() == twice());
  CHECK(dp.buckets().size() > 2);
  torch::optim::SGD optimizer(ours->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD reference_optimizer(reference->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 12; ++step) {
    const auto x = batch(step, step % 4 == 3 ? 1 : 9);  // Uneven parts, and a batch for a single replica.
    const Batch joined{x, target_for(x)};
    optimizer.zero_grad(step % 3 != 0);
    const auto ours_loss = dp.train_step(joined, loss);
    optimizer.step();
    reference_optimizer.zero_grad(step % 3 != 0);
    const auto reference_loss = loss(*reference, joined);
    reference_loss.backward();
    reference_optimizer.step();
    CHECK(torch::allclose(ours_loss, reference_loss.detach(), 0, 1e-12));
  }
  gpu::check_same(ours->parameters(), reference->parameters());
}

TEST_CASE("backward through the joined outputs of two replicas on one GPU", "[gpu]") {
  NEEDS_GPU();
  auto ours = gpu::net(), reference = gpu::net();
  ddpkit::DataParallel dp(ours, two_replicas());
  for (int step = 0; step < 4; ++step) {
    const auto x = batch(step, 9).requires_grad_(), y = batch(step, 9).requires_grad_();
    ours->zero_grad();
    reference->zero_grad();
    // Two forwards before one backward, whose graph has two DataParallel nodes.
    (loss_of(dp(x)) + dp(x * 2).sum()).backward();
    (loss_of(reference->forward(y)) + reference->forward(y * 2).sum()).backward();
    for (std::size_t i = 0; i < ours->parameters().size(); ++i)
      CHECK(torch::allclose(ours->parameters()[i].grad(), reference->parameters()[i].grad(), 0, 1e-12));
    CHECK(torch::allclose(x.grad(), y.grad(), 0, 1e-12));
  }
}

TEST_CASE("a batch on the host goes to the replicas' GPU", "[gpu]") {
  NEEDS_GPU();
  auto net = gpu::net();
  ddpkit::DataParallel dp(net, two_replicas());
  const auto x = batch(0, 8);
  const auto output = dp(x.cpu());
  CHECK(output.device() == x.device());
  CHECK(torch::allclose(output, net->forward(x), 0, 1e-12));
}

TEST_CASE("parameters that only one replica uses get their gradient", "[gpu]") {
  NEEDS_GPU();
  torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2));
  net->to(torch::kCUDA);
  ddpkit::DataParallel dp(net, two_replicas());
  const Batch ones{torch::ones({2, 2}, torch::kCUDA), torch::tensor({0., 1.}).to(torch::kCUDA)};
  dp.train_step(ones, [](torch::nn::SequentialImpl& replica, const Batch& part) {
    const int layer = part.target.item<double>() == 0 ? 0 : 1;
    return replica[static_cast<std::size_t>(layer)]->as<torch::nn::Linear>()->forward(part.data).sum();
  });
  for (const auto& parameter : net->parameters()) {
    REQUIRE(parameter.grad().defined());
    CHECK(torch::allclose(parameter.grad(), torch::full_like(parameter, 0.5)));
  }
}

TEST_CASE("an error in a replica on a GPU is named, and the next step works", "[gpu]") {
  NEEDS_GPU();
  auto net = gpu::net();
  ddpkit::DataParallel dp(net, two_replicas());
  const auto x = batch(0, 8);
  const Batch joined{x, target_for(x)};
  CHECK_THROWS_WITH(dp.train_step(joined,
                                  [&](torch::nn::SequentialImpl& replica, const Batch& part) -> torch::Tensor {
                                    if (part.data.equal(x.narrow(0, 4, 4))) throw std::runtime_error("no such luck");
                                    return loss(replica, part);
                                  }),
                    ContainsSubstring("replica 1 of 2 on cuda:0"));
  dp.train_step(joined, loss);
  for (const auto& parameter : net->parameters()) CHECK(parameter.grad().defined());
}

TEST_CASE("replicas follow the caller to another stream", "[gpu]") {
  NEEDS_GPU();
  auto ours = gpu::net(), reference = gpu::net();
  ddpkit::DataParallel dp(ours, two_replicas());
  const auto guard = c10::impl::VirtualGuardImpl(c10::kCUDA);
  guard.synchronizeDevice(0);
  const c10::StreamGuard on_another(guard.getStreamFromGlobalPool(c10::Device(c10::kCUDA, 0)));
  torch::optim::SGD optimizer(ours->parameters(), 0.1), reference_optimizer(reference->parameters(), 0.1);
  for (int step = 0; step < 6; ++step) {
    auto x = batch(step, 8);
    optimizer.zero_grad();
    if (step % 2 == 0) {
      dp.train_step(Batch{x, target_for(x)}, loss);
    } else {
      torch::mse_loss(dp(x), target_for(x)).backward();
    }
    optimizer.step();
    reference_optimizer.zero_grad();
    loss(*reference, {x, target_for(x)}).backward();
    reference_optimizer.step();
    x.zero_();  // The replicas have read the batch.
  }
  gpu::check_same(ours->parameters(), reference->parameters());
}

TEST_CASE("a backward through replicas that ran on two streams of the caller", "[gpu]") {
  NEEDS_GPU();
  auto ours = gpu::net(), reference = gpu::net();
  ddpkit::DataParallel dp(ours, two_replicas());
  const auto guard = c10::impl::VirtualGuardImpl(c10::kCUDA);
  const c10::Device device(c10::kCUDA, 0);
  const c10::Stream one = guard.getStreamFromGlobalPool(device), other = guard.getStreamFromGlobalPool(device);
  for (int step = 0; step < 3; ++step) {
    const auto x = batch(step, 8).requires_grad_(), y = batch(step, 8).requires_grad_();
    const auto scales = batch(step + 10, 8).narrow(1, 0, 3);
    guard.synchronizeDevice(0);
    torch::Tensor first, second;
    {
      const c10::StreamGuard on_one(one);
      first = (dp(x) * scales).sin().sum();
    }
    const c10::StreamGuard on_other(other);
    second = loss_of(dp(x * 2));
    c10::Event computed(c10::kCUDA);
    computed.record(one);
    computed.block(other);
    ours->zero_grad();
    reference->zero_grad();
    (first + second).backward();
    ((reference->forward(y) * scales).sin().sum() + loss_of(reference->forward(y * 2))).backward();
    for (std::size_t i = 0; i < ours->parameters().size(); ++i)
      CHECK(torch::allclose(ours->parameters()[i].grad(), reference->parameters()[i].grad(), 0, 1e-12));
    CHECK(torch::allclose(x.grad(), y.grad(), 0, 1e-12));
  }
}

TEST_CASE("after an error in a replica on a GPU, the caller may write to the batch", "[gpu]") {
  NEEDS_GPU();
  auto net = gpu::net();
  ddpkit::DataParallel dp(net, two_replicas());
  for (int step = 0; step < 3; ++step) {
    auto x = batch(step, 8);
    const auto fails = [&](torch::nn::SequentialImpl& replica, const Batch& part) -> torch::Tensor {
      static_cast<void>(replica.forward(part.data));
      throw std::runtime_error("no such luck");
    };
    CHECK_THROWS(dp.train_step(Batch{x, target_for(x)}, fails));
    x.zero_();
  }
}

TEST_CASE("DataParallel on a missing GPU is refused", "[gpu]") {
  torch::nn::Linear net(2, 2);
  CHECK_THROWS_WITH(ddpkit::DataParallel(net, {.devices = {c10::Device(c10::kCUDA, 63)}}),
                    ContainsSubstring("on cuda:63"));
}
