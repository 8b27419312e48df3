#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <atomic>
#include <sstream>
#include <thread>

#include <ddpkit/ddpkit.h>

#include "gpu/gpu.h"
#include "gpu/models.h"

namespace {

using Tensors = std::vector<torch::Tensor>;

/// `checkpointed`: the loss of the graphed step is under activation_checkpoint().
template <class Optimizer, class Options>
void check_against_eager(const Options& options, double tolerance, bool checkpointed = false) {
  auto eager = gpu::net(), graphed = gpu::net();
  ddpkit::DistributedDataParallel ddp(graphed, gpu::world_of_one(), gpu::small_buckets());
  Optimizer eager_optimizer(eager->parameters(), options);
  Optimizer optimizer(graphed->parameters(), options, {.capturable = true});
  ddpkit::optim::GraphedStep step(torch::Device(torch::kCUDA, 0), {&optimizer},
                                  [&](const Tensors& inputs) {
                                    optimizer.zero_grad();
                                    const auto output = ddp(inputs[0]);
                                    const auto loss = checkpointed
                                                          ? ddpkit::activation_checkpoint({.preserve_rng_state = false},
                                                                                          gpu::loss_of, output)
                                                          : gpu::loss_of(output);
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

TEST_CASE("a captured step with an activation checkpoint trains as the same step does eagerly", "[gpu]") {
  NEEDS_GPU();
  check_against_eager<ddpkit::optim::FusedSGD>(torch::optim::SGDOptions(1e-2).momentum(0.9), 1e-6, true);
}

TEST_CASE("a GraphedStep without an index is on the current device", "[gpu]") {
  NEEDS_GPUS(2);
  const c10::DeviceGuard on_second(torch::Device(torch::kCUDA, 1));
  ddpkit::optim::GraphedStep step(torch::kCUDA, {}, [](const Tensors& inputs) { return Tensors{inputs[0] * 2}; },
                                  {.warmup_iterations = 3});
  for (int call = 0; call < 6; ++call) {
    const auto output = step({torch::full({10}, call, torch::kCUDA)})[0];
    CHECK(output.device() == torch::Device(torch::kCUDA, 1));
    CHECK((output == 2 * call).all().item<bool>());
  }
  ddpkit::optim::GraphedStep first(torch::kCUDA, {}, [](const Tensors& inputs) { return inputs; },
                                   {.warmup_iterations = 3});
  for (int call = 0; call < 3; ++call) first({torch::ones({10}, torch::kCUDA)});
  CHECK_THROWS_WITH(first({torch::ones({10}, torch::Device(torch::kCUDA, 0))}),
                    ContainsSubstring("the inputs must be on cuda:1, not on cuda:0"));
}

TEST_CASE("a step that throws in its capture leaves the device usable", "[gpu]") {
  NEEDS_GPU();
  int calls = 0;
  const auto doubled = [&](const Tensors& inputs) {
    const auto output = inputs[0] * 2;
    if (++calls == 4) throw std::runtime_error("no such luck");
    return Tensors{output};
  };
  ddpkit::optim::GraphedStep step(torch::kCUDA, {}, doubled, {.warmup_iterations = 3});
  const auto x = torch::ones({10}, torch::kCUDA);
  for (int call = 0; call < 3; ++call) step({x});
  CHECK_THROWS_WITH(step({x}), ContainsSubstring("could not capture the step: no such luck"));
  CHECK_FALSE(step.captured());
  CHECK((step({x})[0] == 2).all().item<bool>());
  CHECK(step.captured());
}

TEST_CASE("another thread may wait for the device during a capture", "[gpu]") {
  NEEDS_GPU();
  std::atomic<float> sum = 0;
  const auto doubled = [&](const Tensors& inputs) {
    std::thread([&] {
      const c10::StreamGuard guard(c10::impl::VirtualGuardImpl(c10::kCUDA).getStreamFromGlobalPool(inputs[0].device()));
      c10::Event done(c10::kCUDA);
      const auto ones = torch::ones({1 << 22}, torch::kCUDA);  // New memory: cudaMalloc.
      done.record(guard.current_stream());
      done.synchronize();
      sum = ones.sum().item<float>();
    }).join();
    return Tensors{inputs[0] * 2};
  };
  ddpkit::optim::GraphedStep step(torch::kCUDA, {}, doubled, {.warmup_iterations = 3});
  for (int call = 0; call < 5; ++call) {
    sum = 0;
    CHECK((step({torch::full({10}, call, torch::kCUDA)})[0] == 2 * call).all().item<bool>());
    if (call < 4) CHECK(sum == 1 << 22);
  }
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
