// FullyShardedDataParallel trains as one process with the whole model.
#include <torch/torch.h>

#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/fused_sgd.h>
#include <ddpkit/optim/sharded_optimizer.h>
#include <ddpkit/parallel/fully_sharded_data_parallel.h>

#include "ranks/comparisons.h"
#include "ranks/fully_sharded_models.h"
#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::FullyShardedDataParallel, ddpkit::FullyShardedOptions, ddpkit::ProcessGroup;
using ddpkit::optim::FusedAdamW, ddpkit::optim::FusedSGD, ddpkit::optim::ShardedOptimizer;
using ddpkit::testing::backward_alone, ddpkit::testing::check_same_bits_on_all_ranks, ddpkit::testing::Cnn;
using ddpkit::testing::largest_difference, ddpkit::testing::LossModel, ddpkit::testing::maker;
using ddpkit::testing::MakeModel, ddpkit::testing::Mlp, ddpkit::testing::Recurrent, ddpkit::testing::Transformer;

namespace {

constexpr int kSteps = 20;

/// A larger eps than the default: some gradients are zero but for rounding, which Adam would amplify.
const auto kAdamW = torch::optim::AdamWOptions(1e-2).weight_decay(0.1).eps(1e-3);

struct Training {
  FullyShardedOptions options = {.min_unit_mb = 0};
  at::ScalarType dtype = at::kDouble;
  double max_norm = 0;
  int accumulate = 1;    ///< Backwards per step.
  bool no_sync = false;  ///< In all but the last backward of a step.
  std::function<void(LossModel& model, int step)> before_step = {};
};

/// Compares with the same training in one process: losses, clipped norms, and the weights and buffers at the end.
void check_trains_as_alone(ProcessGroup& group, const MakeModel& make_model, const Training& training = {}) {
  const double tolerance = training.dtype == at::kDouble ? 1e-10 : 1e-5;
  const auto alone = make_model();
  FusedAdamW alone_optimizer(alone->parameters(), kAdamW);
  const auto model = make_model();
  FullyShardedDataParallel fsdp(model, group, training.options);
  ShardedOptimizer<FusedAdamW> optimizer(fsdp, kAdamW);
  for (int step = 0; step < kSteps; ++step) {
    alone_optimizer.zero_grad();
    optimizer.zero_grad();
    for (LossModel* one : {alone.get(), model.get()}) {
      if (training.before_step) training.before_step(*one, step);
    }
    for (int part = 0; part < training.accumulate; ++part) {
      const int batch = step * training.accumulate + part;
      const double expected = backward_alone(*alone, batch, group.world_size(), group.rank(), training.dtype);
      std::optional<ddpkit::Reducer::NoSync> local;
      if (training.no_sync && part + 1 < training.accumulate) local.emplace(fsdp.no_sync());
      const at::Tensor loss = fsdp(model->input(batch, group.rank(), training.dtype));
      loss.backward();
      CHECK(std::abs(loss.item<double>() - expected) < tolerance);
    }
    if (training.max_norm > 0) {
      const double expected = torch::nn::utils::clip_grad_norm_(alone->parameters(), training.max_norm);
      CHECK(std::abs(optimizer.clip_grad_norm(training.max_norm) - expected) < tolerance);
    }
    alone_optimizer.step();
    optimizer.step();
  }
  for (const auto& parameter : model->parameters()) CHECK_FALSE(parameter.grad().defined());
  const auto whole = fsdp.whole();
  const auto names = model->named_parameters().keys();
  for (std::size_t i = 0; i < names.size(); ++i) {
    INFO("parameter " << names[i]);
    CHECK(largest_difference(model->parameters()[i].detach(), alone->parameters()[i].detach()) < tolerance);
    check_same_bits_on_all_ranks(group, model->parameters()[i].detach());
  }
  if (group.rank() != 0) return;
  for (std::size_t i = 0; i < model->buffers().size(); ++i)
    CHECK(largest_difference(model->buffers()[i], alone->buffers()[i]) < tolerance);
}

void check_all_models(ProcessGroup& group) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
    for (const bool reshard : {true, false}) {
      INFO(c10::toString(dtype) << ", reshard_after_forward " << reshard);
      const Training training{.options = {.min_unit_mb = 0, .reshard_after_forward = reshard}, .dtype = dtype};
      check_trains_as_alone(group, maker<Mlp>(dtype), training);
      check_trains_as_alone(group, maker<Cnn>(dtype), training);
      check_trains_as_alone(group, maker<Recurrent>(dtype), training);
      check_trains_as_alone(group, maker<Transformer>(dtype), training);
    }
  }
}

}  // namespace

RANK_TEST("fully sharded models train as one process", "[fsdp]", 1, 2, 3, 4) { check_all_models(group); }

TEST_CASE("fully sharded models train as one process through gloo", "[ranks][fsdp][gloo]") {
  ddpkit::testing::on_ranks("fully sharded models train as one process through gloo", {2, 3}, check_all_models,
                            {.backend = "gloo"});
}

TEST_CASE("fully sharded models train as one process through hierarchical", "[ranks][fsdp][hierarchical]") {
  ddpkit::testing::on_ranks("fully sharded models train as one process through hierarchical", {2},
                            [](ProcessGroup& group) { check_trains_as_alone(group, maker<Transformer>(at::kDouble)); },
                            {.backend = "hierarchical"});
}

namespace {

/// Training through gloo, with units gathered ahead. The order of units changes between steps.
void check_prefetches(ProcessGroup& group) {
  for (const int prefetch : {0, 1, 2}) {
    INFO("prefetch " << prefetch);
    const Training training{.options = {.min_unit_mb = 0, .prefetch = prefetch}};
    check_trains_as_alone(group, maker<Transformer>(at::kDouble), training);
    Training swaps = training;
    swaps.before_step = [](LossModel& model, int step) { model.as<Transformer>()->gpt->swaps = step / 3 % 2 != 0; };
    check_trains_as_alone(group, maker<Transformer>(at::kDouble), swaps);
    check_trains_as_alone(group, maker<Transformer>(at::kDouble, [](Transformer& model) { model.checkpoint(); }),
                          training);
  }
}

/// The units of a transformer of 4 blocks are gathered once in forward, and again in backward if they were released.
void check_gathers(ProcessGroup& group) {
  for (const int prefetch : {0, 1, 2}) {
    INFO("prefetch " << prefetch);
    const auto model = maker<Transformer>(at::kDouble)();
    FullyShardedDataParallel fsdp(model, group, {.min_unit_mb = 0, .prefetch = prefetch});
    ShardedOptimizer<FusedAdamW> optimizer(fsdp, kAdamW);
    const auto gathers = [&] {
      std::uint64_t sum = 0;
      for (const auto& unit : fsdp.units()) sum += unit.gathers;
      return sum;
    };
    for (int step = 0; step < 4; ++step) {
      const std::uint64_t before = gathers();
      fsdp(model->input(step, group.rank(), at::kDouble)).backward();
      optimizer.step();
      optimizer.zero_grad();
      const int window = group.backend_name() == "shm" ? 1 : 1 + prefetch;
      CHECK(gathers() - before == static_cast<std::uint64_t>(9 - window));
    }
  }
}

}  // namespace

TEST_CASE("fully sharded units are gathered ahead through gloo", "[ranks][fsdp][gloo]") {
  ddpkit::testing::on_ranks("fully sharded units are gathered ahead through gloo", {2, 3}, check_prefetches,
                            {.backend = "gloo"});
}

TEST_CASE("gathering fully sharded units ahead gathers none twice", "[ranks][fsdp][gloo]") {
  for (const char* backend : {"shm", "gloo", "hierarchical"})
    ddpkit::testing::on_ranks("gathering fully sharded units ahead gathers none twice", 2, check_gathers,
                              {.backend = backend});
}

RANK_TEST("fully sharded training clips and accumulates gradients", "[fsdp]", 2, 3) {
  const auto make = maker<Transformer>(at::kDouble);
  check_trains_as_alone(group, make, {.max_norm = 0.05});
  check_trains_as_alone(group, make, {.max_norm = 0.05, .accumulate = 3});
  check_trains_as_alone(group, make, {.max_norm = 0.05, .accumulate = 3, .no_sync = true});
}

RANK_TEST("fully sharded units of other sizes", "[fsdp]", 2, 3) {
  const auto make = maker<Transformer>(at::kDouble);
  check_trains_as_alone(group, make, {.options = {}});  // All blocks are merged.
  check_trains_as_alone(group, make, {.options = {.units = {"gpt.blocks.*.up", "gpt.tokens"}, .min_unit_mb = 0}});
  check_trains_as_alone(group, maker<Recurrent>(at::kDouble),
                        {.options = {.units = {"*", "parts.*"}, .min_unit_mb = 0}});
}

RANK_TEST("fully sharded blocks that are frozen, used twice, tied or checkpointed", "[fsdp]", 2, 3) {
  check_trains_as_alone(group, maker<Transformer>(at::kDouble, [](Transformer& model) {
                          for (const std::size_t i : {0, 2}) {
                            for (auto& parameter : model.gpt->block(i)->parameters())
                              parameter.set_requires_grad(false);
                          }
                          model.gpt->block(3)->up->bias.set_requires_grad(false);
                        }));
  check_trains_as_alone(group, maker<Transformer>(at::kDouble, [](Transformer& model) { model.gpt->twice = true; }));
  check_trains_as_alone(group, maker<Transformer>(at::kDouble, [](Transformer& model) {
                          model.gpt->block(3)->up = model.gpt->block(0)->up;
                          model.gpt->block(3)->replace_module("up", model.gpt->block(0)->up);
                        }));
  for (const bool reshard : {true, false})
    check_trains_as_alone(group, maker<Transformer>(at::kDouble, [](Transformer& model) { model.checkpoint(); }),
                          {.options = {.min_unit_mb = 0, .reshard_after_forward = reshard}});
}

RANK_TEST("without an optimizer fully sharded gradients are whole averages", "[fsdp]", 1, 2, 3) {
  const auto model = maker<Transformer>(at::kDouble)(), alone = maker<Transformer>(at::kDouble)();
  FullyShardedDataParallel fsdp(model, group, {.min_unit_mb = 0});
  for (int step = 0; step < 3; ++step) {
    model->zero_grad();
    alone->zero_grad();
    fsdp(model->input(step, group.rank(), at::kDouble)).backward();
    backward_alone(*alone, step, group.world_size(), group.rank(), at::kDouble);
    CHECK(largest_difference(ddpkit::testing::flat_gradients(*model), ddpkit::testing::flat_gradients(*alone)) < 1e-12);
  }
}

RANK_TEST("a fully sharded SGD with momentum trains as one process", "[fsdp]", 2, 3) {
  const auto options = torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01);
  const auto model = maker<Cnn>(at::kDouble)(), alone = maker<Cnn>(at::kDouble)();
  FullyShardedDataParallel fsdp(model, group, {.min_unit_mb = 0});
  ShardedOptimizer<FusedSGD> optimizer(fsdp, options);
  torch::optim::SGD reference(alone->parameters(), options);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    reference.zero_grad();
    fsdp(model->input(step, group.rank(), at::kDouble)).backward();
    backward_alone(*alone, step, group.world_size(), group.rank(), at::kDouble);
    optimizer.step();
    reference.step();
  }
  const auto whole = fsdp.whole();
  CHECK(largest_difference(ddpkit::testing::flat_parameters(*model), ddpkit::testing::flat_parameters(*alone)) < 1e-10);
}

namespace {

/// Experts in one unit, of which each rank may use others.
struct Experts final : LossModel {
  Experts() {
    torch::manual_seed(3);
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < 3; ++i) {
      torch::nn::ModuleList experts;
      for (int k = 0; k < 3; ++k) experts->push_back(torch::nn::Linear(42, 42));
      blocks->push_back(experts);
    }
  }
  at::Tensor forward(const at::Tensor& x) override {
    const auto chosen = static_cast<std::size_t>(std::abs(x.flatten()[0].item<double>()) * 100) % 2;  // Never the last.
    auto y = x.flatten(1);
    for (const auto& block : *blocks)
      y = torch::tanh((*block->as<torch::nn::ModuleList>())[chosen]->as<torch::nn::Linear>()->forward(y));
    return y.pow(2).mean();
  }
  torch::nn::ModuleList blocks;
};

}  // namespace

TEST_CASE("ranks may use different parameters of a fully sharded unit", "[ranks][fsdp]") {
  for (const char* backend : {"shm", "gloo"}) {
    ddpkit::testing::on_ranks("ranks may use different parameters of a fully sharded unit", {2, 3},
                              [](ProcessGroup& group) {
                                const FullyShardedOptions options{
                                    .units = {"blocks.*"}, .min_unit_mb = 0, .find_unused_parameters = true};
                                check_trains_as_alone(group, maker<Experts>(at::kDouble), {.options = options});
                                check_trains_as_alone(group, maker<Experts>(at::kDouble),
                                                      {.options = options, .accumulate = 3, .no_sync = true});
                              },
                              {.backend = backend});
  }
}
