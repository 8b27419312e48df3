// FullyShardedDataParallel between several GPUs.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <cstdlib>

#include <ddpkit/ddpkit.h>

#include "gpu/gpu.h"
#include "gpu/models.h"
#include "ranks/fully_sharded_training.h"

using ddpkit::FullyShardedDataParallel, ddpkit::ProcessGroup, ddpkit::testing::check_trains_as_alone;
using ddpkit::testing::Cnn, ddpkit::testing::largest_difference, ddpkit::testing::maker, ddpkit::testing::Mlp;
using ddpkit::testing::Training, ddpkit::testing::Transformer;
using gpu::on_gpus;

namespace {

/// Virtual GPUs lack the fused kernels of attention.
void use_plain_attention() {
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setSDPUseMemEfficient(false);
}

/// On virtual GPUs, whose operators are slow, the CPU trains the model alone. With delays of streams, which make
/// operators slower still, an error in the order shows within a few steps.
void check_trains(ProcessGroup& group, const ddpkit::testing::MakeModel& make_model, Training training = {}) {
  use_plain_attention();
  if (has_virtual_gpus()) training.alone = at::kCPU;
  if (std::getenv("VGPU_JITTER_US")) training.steps = 6;
  check_trains_as_alone(group, make_model, training);
}

void check_models(ProcessGroup& group, bool reshard, int prefetch) {
  INFO("prefetch " << prefetch << ", reshard_after_forward " << reshard);
  const Training training{.options = {.min_unit_mb = 0, .reshard_after_forward = reshard, .prefetch = prefetch},
                          .dtype = at::kFloat};
  check_trains(group, maker<Mlp>(at::kFloat), training);
  check_trains(group, maker<Cnn>(at::kFloat), training);
  check_trains(group, maker<Transformer>(at::kFloat), training);
}

}  // namespace

TEST_CASE("fully sharded models on 2 GPUs train as one process", "[gpu][fsdp]") {
  NEEDS_GPUS(2);
  on_gpus("fully sharded models on 2 GPUs train as one process", 2, [](ProcessGroup& group) {
    check_models(group, true, 2);
    check_models(group, false, 1);
  });
}

TEST_CASE("fully sharded models on 4 GPUs train as one process", "[gpu][fsdp]") {
  NEEDS_GPUS(4);
  on_gpus("fully sharded models on 4 GPUs train as one process", 4,
          [](ProcessGroup& group) { check_models(group, true, 1); });
}

TEST_CASE("two replicas of a fully sharded model on 4 GPUs train as one process", "[gpu][fsdp]") {
  NEEDS_GPUS(4);
  on_gpus("two replicas of a fully sharded model on 4 GPUs train as one process", 4, [](ProcessGroup& group) {
    const ddpkit::FullyShardedOptions options{.min_unit_mb = 0, .replicas = 2};
    check_trains(group, maker<Cnn>(at::kFloat), {.options = options, .dtype = at::kFloat});
    check_trains(group, maker<Transformer>(at::kDouble), {.options = options, .max_norm = 0.05});
  });
}

TEST_CASE("fully sharded training on 2 GPUs clips and accumulates gradients", "[gpu][fsdp]") {
  NEEDS_GPUS(2);
  on_gpus("fully sharded training on 2 GPUs clips and accumulates gradients", 2, [](ProcessGroup& group) {
    const auto make = maker<Transformer>(at::kDouble);
    check_trains(group, make, {.max_norm = 0.05});
    check_trains(group, make, {.max_norm = 0.05, .accumulate = 3});
    check_trains(group, make, {.max_norm = 0.05, .accumulate = 3, .no_sync = true});
    check_trains(group, maker<Transformer>(at::kDouble, [](Transformer& model) { model.checkpoint(); }));
  });
}

TEST_CASE("fully sharded models on 2 GPUs compute and reduce in another type", "[gpu][fsdp]") {
  NEEDS_GPUS(2);
  on_gpus("fully sharded models on 2 GPUs compute and reduce in another type", 2, [](ProcessGroup& group) {
    Training training{.options = {.min_unit_mb = 0}, .dtype = at::kFloat};
    for (const auto& reduce : {std::optional(at::kDouble), std::optional<at::ScalarType>()}) {
      training.options.precision = {.param_dtype = at::kDouble, .reduce_dtype = reduce};
      check_trains(group, maker<Mlp>(at::kFloat), training);
      check_trains(group, maker<Transformer>(at::kFloat), training);
    }
  });
}

TEST_CASE("fully sharded units on a GPU are used on two streams", "[gpu][fsdp]") {
  NEEDS_GPUS(2);
  on_gpus("fully sharded units on a GPU are used on two streams", 2, [](ProcessGroup& group) {
    const auto side = c10::impl::VirtualGuardImpl(torch::kCUDA).getStreamFromGlobalPool(group.device());
    const auto model = maker<Mlp>(at::kFloat)(), alone = maker<Mlp>(at::kFloat)();
    model->to(group.device());
    alone->to(group.device());
    FullyShardedDataParallel fsdp(model, group, {.min_unit_mb = 0});
    ddpkit::optim::ShardedOptimizer<ddpkit::optim::FusedAdamW> optimizer(fsdp, ddpkit::testing::kAdamW);
    ddpkit::optim::FusedAdamW alone_optimizer(alone->parameters(), ddpkit::testing::kAdamW);
    const auto batch = [&](int step, int rank) { return model->input(step, rank, at::kFloat).to(group.device()); };
    for (int step = 0; step < 4; ++step) {
      fsdp(batch(step, group.rank())).backward();
      optimizer.step();
      optimizer.zero_grad();
      ddpkit::testing::backward_alone(*alone, step, 2, group.rank(), at::kFloat);
      alone_optimizer.step();
      alone_optimizer.zero_grad();
      const at::NoGradGuard no_grad;
      const double expected = alone->forward(batch(step, 0)).item<double>();
      const auto whole = fsdp.whole();
      const at::Tensor first = model->forward(batch(step, 0));
      at::Tensor second;
      {
        const c10::StreamGuard on_side(side);
        second = model->forward(batch(step, 0));  // Waits for the gathers, but not for the other stream.
        CHECK(std::abs(second.item<double>() - expected) < 1e-5);
      }
      CHECK(std::abs(first.item<double>() - expected) < 1e-5);
      {
        const c10::StreamGuard on_side(side);
        for (const auto& parameter : model->parameters()) parameter.mul_(0.5);  // Reaches the shards.
      }
      for (const auto& parameter : alone->parameters()) parameter.mul_(0.5);
    }
    const at::NoGradGuard no_grad;
    {
      const auto scope = fsdp.gathering();
      const c10::StreamGuard on_side(side);
      model->forward(batch(0, 0));
    }
    for (std::size_t i = 0; i < alone->parameters().size(); ++i)  // The next forward copies it to the shards.
      model->parameters()[i].set_data(alone->parameters()[i].detach().clone());
    CHECK(std::abs((fsdp(batch(1, 0)) - alone->forward(batch(1, 0))).item<double>()) < 1e-5);
  });
}

TEST_CASE("a fully sharded step on 2 GPUs has the memory of its formula", "[gpu][fsdp]") {
  NEEDS_GPUS(2);
  on_gpus("a fully sharded step on 2 GPUs has the memory of its formula", 2, [](ProcessGroup& group) {
    constexpr int kLayers = 16, kWidth = 256;
    torch::nn::Sequential net;
    for (int i = 0; i < kLayers; ++i) net->push_back(torch::nn::Linear(kWidth, kWidth));
    net->to(group.device());
    FullyShardedDataParallel fsdp(net, group, {.min_unit_mb = 0});
    ddpkit::optim::ShardedOptimizer<ddpkit::optim::FusedAdamW> optimizer(fsdp, ddpkit::testing::kAdamW);
    const auto step = [&] {
      fsdp(torch::ones({1, kWidth}, group.device())).sum().backward();
      optimizer.step();
      optimizer.zero_grad();
    };
    step();  // Creates the optimizer's state.
    auto* memory = c10::getDeviceAllocator(torch::kCUDA);
    memory->resetPeakStats(group.device().index());
    for (int i = 0; i < 3; ++i) step();
    const auto total = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const double unit = sizeof(float) * kWidth * (kWidth + 1);
    const double peak = static_cast<double>(memory->getDeviceStats(group.device().index()).allocated_bytes[total].peak);
    INFO("the peak is that of " << peak / unit << " units");
    // Weights, gradients and two states in shards; two whole units; gradients of two units, as autograd makes them, in
    // buckets, and their shards.
    CHECK(peak < unit * (4 * kLayers / 2 + 2 + 5 + 1));
    CHECK(peak > unit * (4 * kLayers / 2 + 2));
  });
}

TEST_CASE("a graphed step with fully sharded parameters is refused", "[gpu][fsdp]") {
  NEEDS_GPU();
  on_gpus("a graphed step with fully sharded parameters is refused", 1, [](ProcessGroup& group) {
    const auto model = maker<Mlp>(at::kFloat)();
    model->to(group.device());
    FullyShardedDataParallel fsdp(model, group, {.min_unit_mb = 0});
    const auto input = model->input(0, 0, at::kFloat).to(group.device());
    ddpkit::optim::GraphedStep step(group.device(), {},
                                    [&](const std::vector<at::Tensor>& batch) { return std::vector{fsdp(batch[0])}; });
    CHECK_THROWS_WITH(step({input}), ContainsSubstring("GraphedStep does not support FullyShardedDataParallel"));
    CHECK(fsdp(input).isfinite().item<bool>());
  });
}
