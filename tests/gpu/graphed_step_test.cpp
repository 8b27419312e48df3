#include <torch/torch.h>

#include <sstream>

#include <ddpkit/ddpkit.h>

#include "gpu/gpu.h"
#include "gpu/models.h"

namespace {

using Tensors = std::vector<torch::Tensor>;

template <class Optimizer, class Options>
void check_against_eager(const Options& options, double tolerance) {
  auto eager = gpu::net(), graphed = gpu::net();
  ddpkit::DistributedDataParallel ddp(graphed, gpu::world_of_one(), gpu::small_buckets());
  Optimizer eager_optimizer(eager->parameters(), options);
  Optimizer optimizer(graphed->parameters(), options, {.capturable = true});
  ddpkit::optim::GraphedStep step(torch::Device(torch::kCUDA, 0), {&optimizer},
                                  [&](const Tensors& inputs) {
                                    optimizer.zero_grad();
                                    const auto loss = gpu::loss_of(ddp(inputs[0]));
                                    loss.backward();
                                    optimizer.step();
                                    return Tensors{loss.detach()};
                                  },
                                  {.warmup_iterations = 5});
  for (int i = 0; i < 20; ++i) {
    if (i == 14) {
      // The learning rate may change with or without a captured graph.
      eager_optimizer.param_groups()[0].options().set_lr(options.lr() / 4);
      optimizer.param_groups()[0].options().set_lr(options.lr() / 4);
    }
    const auto x = gpu::batch(i, 16);
    eager_optimizer.zero_grad();
    const auto loss = gpu::loss_of(eager->forward(x));
    loss.backward();
    eager_optimizer.step();
    const auto graphed_loss = step({x});
    CHECK(step.captured() == (i >= 5));
    CHECK(torch::allclose(graphed_loss[0], loss.detach(), 0, tolerance));
  }
  gpu::check_same(graphed->parameters(), eager->parameters(), tolerance);
  CHECK_THROWS_WITH(step({gpu::batch(0, 8)}), ContainsSubstring("[8, 12]"));
  // Archives count the replayed steps too: both trainings continue equally from here.
  std::stringstream archive;
  torch::save(optimizer, archive);
  Optimizer resumed(graphed->parameters(), options);
  torch::load(resumed, archive);
  for (auto* each : {&eager_optimizer, &resumed}) {
    auto& net = each == &resumed ? graphed : eager;
    each->zero_grad();
    gpu::loss_of(net->forward(gpu::batch(20, 16))).backward();
    each->step();
  }
  gpu::check_same(graphed->parameters(), eager->parameters(), tolerance);
}

}  // namespace

TEST_CASE("a captured step trains as the same step does eagerly", "[gpu]") {
  NEEDS_GPU();
  // Learning rates are float32 on the device.
  check_against_eager<ddpkit::optim::FusedAdamW>(torch::optim::AdamWOptions(1e-2).weight_decay(0.1), 1e-6);
  check_against_eager<ddpkit::optim::FusedAdam>(torch::optim::AdamOptions(1e-2), 1e-6);
  check_against_eager<ddpkit::optim::FusedSGD>(torch::optim::SGDOptions(1e-2).momentum(0.9), 1e-6);
}

TEST_CASE("an optimizer that cannot be captured is refused", "[gpu]") {
  NEEDS_GPU();
  auto net = gpu::net();
  ddpkit::optim::FusedSGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
  CHECK_THROWS_WITH(
      ddpkit::optim::GraphedStep(torch::Device(torch::kCUDA, 0), {&optimizer}, [](const Tensors& x) { return x; }),
      ContainsSubstring("capturable"));
}

TEST_CASE("a step on the CPU is not captured, with a message", "[gpu]") {
  CHECK_THROWS_WITH(ddpkit::optim::GraphedStep(torch::kCPU, {}, [](const Tensors& x) { return x; }),
                    ContainsSubstring("call the step as it is"));
}
