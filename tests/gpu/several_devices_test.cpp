// DataParallel on several GPUs of one process.
#include <torch/torch.h>

#include <ddpkit/ddpkit.h>

#include "gpu/gpu.h"
#include "gpu/models.h"

namespace {

using Batch = torch::data::Example<>;

ddpkit::DataParallelOptions on_three() {
  std::vector<c10::Device> devices;
  for (c10::DeviceIndex i = 0; i < 3; ++i) devices.emplace_back(c10::kCUDA, i);
  return {.devices = devices, .bucket_cap_mb = 0.01, .first_bucket_cap_mb = 0.001};
}

torch::Tensor three_loss(torch::nn::SequentialImpl& net, const Batch& part) {
  return torch::mse_loss(net.forward(part.data), part.target);
}

}  // namespace

TEST_CASE("train_step of replicas on 3 GPUs trains as the bare module does", "[gpu]") {
  NEEDS_GPUS(3);
  auto ours = gpu::net(), reference = gpu::net();
  ddpkit::DataParallel dp(ours, on_three());
  torch::optim::SGD optimizer(ours->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD reference_optimizer(reference->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 12; ++step) {
    const auto x = gpu::batch(step, step % 4 == 3 ? 2 : 10);
    const Batch joined{x, x.narrow(1, 0, 3) * 2};
    optimizer.zero_grad(step % 3 != 0);
    const auto loss = dp.train_step(joined, three_loss);
    optimizer.step();
    reference_optimizer.zero_grad(step % 3 != 0);
    const auto reference_loss = three_loss(*reference, joined);
    reference_loss.backward();
    reference_optimizer.step();
    CHECK(torch::allclose(loss, reference_loss.detach(), 0, 1e-12));
  }
  gpu::check_same(ours->parameters(), reference->parameters());
}

TEST_CASE("backward through the joined outputs of replicas on 3 GPUs", "[gpu]") {
  NEEDS_GPUS(3);
  auto ours = gpu::net(), reference = gpu::net();
  ddpkit::DataParallel dp(ours, on_three());
  for (int step = 0; step < 4; ++step) {
    const auto x = gpu::batch(step, 10).requires_grad_(), y = gpu::batch(step, 10).requires_grad_();
    ours->zero_grad();
    reference->zero_grad();
    gpu::loss_of(dp(x)).backward();
    gpu::loss_of(reference->forward(y)).backward();
    for (std::size_t i = 0; i < ours->parameters().size(); ++i)
      CHECK(torch::allclose(ours->parameters()[i].grad(), reference->parameters()[i].grad(), 0, 1e-12));
    CHECK(torch::allclose(x.grad(), y.grad(), 0, 1e-12));
  }
}

TEST_CASE("a replica's GPU is its current device", "[gpu]") {
  NEEDS_GPUS(3);
  auto net = gpu::net();
  ddpkit::DataParallel dp(net, on_three());
  const auto x = gpu::batch(0, 9);
  const auto loss = [](torch::nn::SequentialImpl& replica, const Batch& part) {
    const auto zero = torch::zeros({}, torch::TensorOptions(torch::kDouble).device(torch::kCUDA));
    if (zero.device() != part.data.device()) throw std::runtime_error("on " + zero.device().str());
    return three_loss(replica, part) + zero;
  };
  CHECK_NOTHROW(dp.train_step(Batch{x, x.narrow(1, 0, 3) * 2}, loss));
}

TEST_CASE("an error in the replica of the third GPU is named, and the next step works", "[gpu]") {
  NEEDS_GPUS(3);
  auto net = gpu::net();
  ddpkit::DataParallel dp(net, on_three());
  const auto x = gpu::batch(0, 9);
  const Batch joined{x, x.narrow(1, 0, 3) * 2};
  const auto fails = [](torch::nn::SequentialImpl& replica, const Batch& part) -> torch::Tensor {
    if (part.data.device().index() == 2) throw std::runtime_error("no such luck");
    return three_loss(replica, part);
  };
  CHECK_THROWS_WITH(dp.train_step(joined, fails), ContainsSubstring("cuda:2"));
  dp.train_step(joined, three_loss);
  for (const auto& parameter : net->parameters()) CHECK(parameter.grad().defined());
}
