// FullyShardedDataParallel trains as one process with the whole model.
#include <torch/torch.h>

#include <ddpkit/optim/fused_sgd.h>
#include <ddpkit/optim/sharded_optimizer.h>
#include <ddpkit/parallel/fully_sharded_data_parallel.h>

#include "ranks/comparisons.h"
#include "ranks/fully_sharded_training.h"
#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::FullyShardedDataParallel, ddpkit::FullyShardedOptions, ddpkit::ProcessGroup;
using ddpkit::optim::FusedAdamW, ddpkit::optim::FusedSGD, ddpkit::optim::ShardedOptimizer;
using ddpkit::testing::backward_alone, ddpkit::testing::check_trains_as_alone, ddpkit::testing::Cnn;
using ddpkit::testing::kAdamW, ddpkit::testing::kSteps, ddpkit::testing::largest_difference;
using ddpkit::testing::LossModel, ddpkit::testing::maker, ddpkit::testing::Mlp, ddpkit::testing::Recurrent;
using ddpkit::testing::Training, ddpkit::testing::Transformer;

namespace {

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

namespace {

/// Two replicas of two ranks each.
void check_replicas(ProcessGroup& group) {
  for (const bool reshard : {true, false}) {
    const FullyShardedOptions options{.min_unit_mb = 0, .reshard_after_forward = reshard, .replicas = 2};
    check_trains_as_alone(group, maker<Cnn>(at::kDouble), {.options = options});
    check_trains_as_alone(group, maker<Transformer>(at::kDouble), {.options = options, .max_norm = 0.05});
    check_trains_as_alone(group, maker<Transformer>(at::kDouble), {.options = options, .accumulate = 3});
    check_trains_as_alone(group, maker<Transformer>(at::kDouble),
                          {.options = options, .accumulate = 3, .no_sync = true});
  }
}

}  // namespace

TEST_CASE("two replicas of a fully sharded model train as one process", "[ranks][fsdp]") {
  for (const char* backend : {"shm", "gloo"})
    ddpkit::testing::on_ranks("two replicas of a fully sharded model train as one process", 4, check_replicas,
                              {.backend = backend});
}

RANK_TEST("replicas keep shards among their own ranks", "[fsdp]", 4) {
  const auto model = maker<Transformer>(at::kDouble)();
  CHECK_THROWS_WITH(FullyShardedDataParallel(model, group, {.replicas = 3}),
                    ContainsSubstring("replicas is 3, but must divide the number of ranks, which is 4"));
  std::int64_t all = 0, own = 0;
  for (const auto& parameter : ddpkit::testing::unique_parameters(*model)) all += parameter.numel();
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) parameter.add_(group.rank());  // All ranks get those of rank 0.
  }
  FullyShardedDataParallel fsdp(model, group, {.min_unit_mb = 0, .replicas = 2});
  {
    const auto whole = fsdp.whole();
    const auto expected = maker<Transformer>(at::kDouble)();
    CHECK(torch::equal(ddpkit::testing::flat_parameters(*model), ddpkit::testing::flat_parameters(*expected)));
  }
  ShardedOptimizer<FusedSGD> optimizer(fsdp, torch::optim::SGDOptions(0.1));
  for (const auto& piece : optimizer.param_groups()[0].params()) own += piece.numel();
  const auto sum = torch::full({1}, own, torch::kLong);
  group.all_reduce(sum);
  CHECK(sum.item<std::int64_t>() == 2 * all);
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

/// In backward, some ranks have all gradients of the units of `ends` before `middle` is gathered, others after.
struct Ends final : LossModel {
  Ends() {
    torch::manual_seed(3);
    first = register_module("first", torch::nn::Linear(42, 42));
    middle = register_module("middle", torch::nn::Linear(42, 42));
    ends = register_module("ends", torch::nn::ModuleList());
    for (int i = 0; i < 2; ++i) {
      torch::nn::ModuleList end;
      for (int k = 0; k < 3; ++k) end->push_back(torch::nn::Linear(42, 42));
      ends->push_back(end);
    }
  }
  at::Tensor forward(const at::Tensor& x) override {
    const auto layer = [&](std::size_t i, std::size_t k) {
      return (*(*ends)[i]->as<torch::nn::ModuleList>())[k]->as<torch::nn::Linear>();
    };
    const bool early = static_cast<int>(std::abs(x.flatten()[0].item<double>()) * 100) % 2 != 0;
    const auto input = x.flatten(1);
    auto y = first(input);  // Requires a gradient on all ranks, so all use `middle` in backward.
    for (std::size_t i = 0; i < 2; ++i)
      y = early ? y + layer(i, 0)->forward(input).detach() : y + layer(i, 1)->forward(input);
    y = torch::tanh(middle(torch::tanh(y)));
    return layer(1, 2)->forward(torch::tanh(layer(0, 2)->forward(y))).pow(2).mean();
  }
  torch::nn::Linear first{nullptr}, middle{nullptr};
  torch::nn::ModuleList ends;
};

}  // namespace

TEST_CASE("ranks may reduce a fully sharded unit before or after another is gathered", "[ranks][fsdp]") {
  for (const char* backend : {"shm", "gloo"}) {
    ddpkit::testing::on_ranks(
        "ranks may reduce a fully sharded unit before or after another is gathered", {2, 3},
        [](ProcessGroup& group) {
          const FullyShardedOptions options{
              .units = {"first", "middle", "ends.*"}, .min_unit_mb = 0, .prefetch = 0, .find_unused_parameters = true};
          check_trains_as_alone(group, maker<Ends>(at::kDouble), {.options = options});
        },
        {.backend = backend});
  }
}

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
