#pragma once

#include <torch/torch.h>

#include <vector>

#include <ddpkit/ddpkit.h>

#include "gpu/models.h"

namespace gpu {

/// A captured step of a small network on this rank's part of a batch.
struct Captured {
  explicit Captured(const ddpkit::ProcessGroup& group)
      : rank(group.rank()), net(on(group.device())), ddp(net, group, small_buckets()) {}
  static torch::nn::Sequential on(at::Device device) {
    auto net = gpu::net();
    net->to(device);
    return net;
  }
  torch::Tensor operator()(int call) {
    torch::manual_seed(100 + call);
    const auto batch = torch::randn({4 * ddp.group().world_size(), 12}, torch::kDouble).narrow(0, 4 * rank, 4);
    return step({batch.to(net->parameters()[0].device())})[0];
  }

  int rank;
  torch::nn::Sequential net;
  ddpkit::DistributedDataParallel<torch::nn::SequentialImpl> ddp;
  ddpkit::optim::FusedSGD optimizer{
      net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9), {.capturable = true}};
  ddpkit::optim::GraphedStep step{net->parameters()[0].device(),
                                  {&optimizer},
                                  [this](const std::vector<torch::Tensor>& inputs) {
                                    optimizer.zero_grad();
                                    const auto loss = loss_of(ddp(inputs[0]));
                                    loss.backward();
                                    optimizer.step();
                                    return std::vector{loss.detach()};
                                  },
                                  {.warmup_iterations = 3}};
};

}  // namespace gpu
