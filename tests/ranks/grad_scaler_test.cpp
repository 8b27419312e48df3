#include <torch/torch.h>

#include <sstream>

#include <ddpkit/error.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/fused_sgd.h>
#include <ddpkit/optim/grad_scaler.h>
#include <ddpkit/optim/precision.h>
#include <ddpkit/optim/sharded_optimizer.h>
#include <ddpkit/parallel/distributed_data_parallel.h>

#include "optim/fused_optimizer.h"
#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::optim::FusedAdamW;
using ddpkit::optim::FusedSGD;
using ddpkit::optim::GradScaler;
using torch::optim::SGDOptions;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::unique_ptr<torch::optim::Optimizer> make_optimizer(bool fused, const torch::Tensor& weight) {
  if (fused) return std::make_unique<FusedSGD>(std::vector<torch::Tensor>{weight}, SGDOptions(1.0));
  return std::make_unique<torch::optim::SGD>(std::vector<torch::Tensor>{weight}, SGDOptions(1.0));
}

}  // namespace

RANK_TEST("an overflow on one rank skips the step on all", "[grad_scaler]", 1, 2, 3) {
  const int last = group.world_size() - 1;
  for (const bool fused : {false, true}) {
    for (const bool unscale_first : {false, true}) {
      for (const float bad : {kInfinity, -kInfinity, NAN}) {
        INFO("fused " << fused << ", unscale_ first " << unscale_first << ", " << bad);
        auto weight = torch::zeros({70000}).requires_grad_(true);
        const auto optimizer = make_optimizer(fused, weight);
        GradScaler scaler(group, {.init_scale = 8});
        // DDP does not average this gradient, so only the last rank has the overflow.
        auto gradient = torch::full({70000}, 4.0f);
        weight.mutable_grad() = gradient;
        if (group.rank() == last) gradient[69999] = bad;
        if (unscale_first) scaler.unscale_(*optimizer);
        CHECK_FALSE(scaler.step(*optimizer));
        scaler.update();
        CHECK(torch::equal(weight.detach(), torch::zeros({70000})));
        CHECK(scaler.get_scale() == 4);
        // The next gradient is finite.
        weight.mutable_grad() = torch::full({70000}, 4.0f);
        if (unscale_first) {
          scaler.unscale_(*optimizer);
          CHECK(weight.grad()[0].item<float>() == 1);
        }
        CHECK(scaler.step(*optimizer));
        scaler.update();
        CHECK(torch::equal(weight.detach(), torch::full({70000}, -1.0f)));
        CHECK(scaler.get_scale() == 4);
        CHECK(scaler.get_growth_tracker() == 1);
      }
    }
  }
}

RANK_TEST("float16 autocast that overflows on one rank skips the step on all", "[grad_scaler][precision]", 2) {
  for (const bool sharded : {false, true}) {
    INFO("sharded " << sharded);
    torch::manual_seed(3);
    torch::nn::Linear model(8, 4);
    ddpkit::DistributedDataParallel ddp(model, group);
    const torch::optim::AdamWOptions options(0.1);
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (sharded)
      optimizer = std::make_unique<ddpkit::optim::ShardedOptimizer<FusedAdamW>>(ddp, options);
    else
      optimizer = std::make_unique<FusedAdamW>(model->parameters(), options);
    GradScaler scaler(group, {.init_scale = 1024});
    for (int step = 0; step < 6; ++step) {
      const bool overflows = step == 2;
      const auto before = model->weight.detach().clone();
      model->zero_grad();
      if (auto* whole = dynamic_cast<ddpkit::optim::ShardedOptimizerBase*>(optimizer.get())) whole->zero_grad();
      torch::manual_seed(static_cast<std::uint64_t>(10 * step + group.rank()));
      // 60000 is in the range of float16; a sum of 8 products of it is not.
      const auto input = overflows && group.rank() == 1 ? torch::full({2, 8}, 60000.0f) : torch::randn({2, 8});
      torch::Tensor loss;
      {
        const ddpkit::optim::Autocast autocast(torch::kCPU, torch::kHalf);
        const auto output = ddp(input);
        REQUIRE(output.scalar_type() == torch::kHalf);
        loss = output.to(torch::kFloat).square().mean();
      }
      scaler.scale(loss).backward();
      CHECK(scaler.step(*optimizer) == !overflows);
      scaler.update();
      CHECK(torch::equal(model->weight.detach(), before) == overflows);
      CHECK(scaler.get_scale() == (step < 2 ? 1024 : 512));
      CHECK(model->weight.isfinite().all().item<bool>());
      const auto all = group.all_gather(model->weight.detach().contiguous());
      CHECK(torch::equal(all[0], all[1]));
    }
  }
}

TEST_CASE("the scale grows and shrinks by Python's rule", "[grad_scaler]") {
  // torch.amp.GradScaler("cpu", init_scale=8, growth_interval=3), PyTorch 2.11: the scale after each update. `overflow`
  // marks the iterations with an overflow.
  const std::vector<bool> overflow{false, false, false, false, true, false, false, true, false, false, false, false};
  const std::vector<double> expected{8, 8, 16, 16, 8, 8, 8, 4, 4, 4, 8, 8};
  auto weight = torch::zeros({2}).requires_grad_(true);
  torch::optim::SGD optimizer(std::vector<torch::Tensor>{weight}, SGDOptions(1.0));
  GradScaler scaler({}, {.init_scale = 8, .growth_interval = 3});
  for (std::size_t i = 0; i < overflow.size(); ++i) {
    optimizer.zero_grad();
    scaler.scale((weight * (overflow[i] ? kInfinity : 1.0f)).sum()).backward();
    CHECK(scaler.step(optimizer) != overflow[i]);
    scaler.update();
    CHECK(scaler.get_scale() == expected[i]);
  }
  // The scale never exceeds float32.
  GradScaler large({}, {.init_scale = 1e38, .growth_factor = 10, .growth_interval = 1});
  weight.mutable_grad() = torch::ones({2});
  large.step(optimizer);
  large.update();
  CHECK(large.get_scale() == 1e38);
  large.update(2.0);
  CHECK(large.get_scale() == 2);
}

TEST_CASE("the scaler's state is saved, and one that is off does nothing", "[grad_scaler]") {
  auto weight = torch::ones({2}).requires_grad_(true);
  FusedSGD optimizer({weight}, SGDOptions(1.0));
  GradScaler scaler({}, {.init_scale = 8, .growth_interval = 3});
  weight.mutable_grad() = torch::full({2}, 8.0f);
  scaler.step(optimizer);
  scaler.update();
  std::stringstream stream;
  torch::serialize::OutputArchive output;
  scaler.save(output);
  output.save_to(stream);
  torch::serialize::InputArchive input;
  input.load_from(stream);
  GradScaler loaded;
  loaded.load(input);
  CHECK(loaded.get_scale() == 8);
  CHECK(loaded.get_growth_tracker() == 1);
  for (int i = 0; i < 2; ++i) {
    loaded.step(optimizer);
    loaded.update();
  }
  CHECK(loaded.get_scale() == 16);

  GradScaler off({}, {.enabled = false});
  CHECK(off.scale(weight).is_same(weight));
  weight.mutable_grad() = torch::full({2}, kInfinity);
  CHECK(off.step(optimizer));
  off.update();
  CHECK(off.get_scale() == 1);
}

TEST_CASE("the scaler refuses calls out of order", "[grad_scaler]") {
  auto weight = torch::ones({2}).requires_grad_(true);
  FusedSGD optimizer({weight}, SGDOptions(1.0));
  GradScaler scaler;
  CHECK_THROWS_WITH(scaler.update(), ContainsSubstring("before any step()"));
  weight.mutable_grad() = torch::ones({2});
  scaler.unscale_(optimizer);
  CHECK_THROWS_WITH(scaler.unscale_(optimizer), ContainsSubstring("already been called"));
  scaler.step(optimizer);
  CHECK_THROWS_WITH(scaler.step(optimizer), ContainsSubstring("already been called"));
  CHECK_THROWS_WITH(scaler.unscale_(optimizer), ContainsSubstring("after step()"));
  scaler.update();
  auto half = torch::ones({2}, torch::kHalf).requires_grad_(true);
  half.mutable_grad() = torch::ones({2}, torch::kHalf);
  torch::optim::SGD of_half({half}, SGDOptions(1.0));
  CHECK_THROWS_WITH(scaler.step(of_half), ContainsSubstring("float16 gradients"));
  CHECK_THROWS_AS(GradScaler({}, {.growth_factor = 1}), ddpkit::InvalidArgument);
}

TEST_CASE("float16 gradients are unscaled in float32 on their way into master weights", "[grad_scaler][master]") {
  auto weight = torch::zeros({3}, torch::kHalf).requires_grad_(true);
  FusedSGD optimizer({weight}, SGDOptions(1.0), {.master_weights = true});
  GradScaler scaler({}, {.init_scale = 65536});
  // The scaled gradient of 1e-8, which is zero in float16.
  weight.mutable_grad() = torch::full({3}, 1e-8 * 65536, torch::kHalf);
  const float scaled = weight.grad()[0].item<float>();
  CHECK(scaler.step(optimizer));
  scaler.update();
  const auto& state = *optimizer.state().at(weight.unsafeGetTensorImpl());
  CHECK(dynamic_cast<const ddpkit::optim::MasterWeight&>(state).master_param[0].item<float>() == -scaled / 65536);
  weight.mutable_grad()[1] = std::numeric_limits<float>::infinity();
  CHECK_FALSE(scaler.step(optimizer));
  CHECK_THROWS_WITH((scaler.update(), scaler.unscale_(optimizer)), ContainsSubstring("float16 gradients"));
}

TEST_CASE("the scaler unscales a weight under two names once", "[grad_scaler]") {
  auto weight = torch::ones({2}).requires_grad_(true);
  torch::optim::SGD optimizer({weight, weight}, SGDOptions(1.0));
  GradScaler scaler({}, {.init_scale = 4});
  weight.mutable_grad() = torch::full({2}, 8.0f);
  scaler.unscale_(optimizer);
  CHECK(weight.grad()[0].item<float>() == 2);
}

RANK_TEST("a skipped step skips its clipping too", "[grad_scaler][optim][sharded]", 1, 2) {
  for (const bool sharded : {false, true}) {
    for (const bool scaled : {true, false}) {
      for (const float bad : {kInfinity, NAN}) {
        INFO("sharded " << sharded << ", scaled " << scaled << ", " << bad);
        // Two equal models; one has a bad step before the finite step.
        std::vector<torch::Tensor> results;
        for (const bool first_is_bad : {true, false}) {
          torch::manual_seed(3);
          torch::nn::Linear model(8, 4);
          ddpkit::DistributedDataParallel ddp(model, group);
          GradScaler scaler(group, {.init_scale = 1024, .enabled = scaled});
          const auto train = [&](auto& optimizer) {
            for (int step = first_is_bad ? 0 : 1; step < 2; ++step) {
              optimizer.zero_grad();
              torch::Tensor loss = scaler.scale(ddp(torch::ones({2, 8})).square().sum());
              if (step == 0) loss = loss * bad;
              loss.backward();
              scaler.unscale_(optimizer);
              const double norm = optimizer.clip_grad_norm(0.1);
              CHECK(std::isfinite(norm) == (step == 1));
              // Without a scaler, the loop skips the step.
              if (scaled || std::isfinite(norm)) CHECK(scaler.step(optimizer) == (step == 1));
              scaler.update(scaled ? std::optional<double>(1024) : std::nullopt);
            }
          };
          const torch::optim::AdamWOptions options(0.1);
          if (sharded) {
            ddpkit::optim::ShardedOptimizer<FusedAdamW> optimizer(ddp, options);
            train(optimizer);
            results.push_back(model->weight.detach().clone());
          } else {
            FusedAdamW optimizer(model->parameters(), options);
            train(optimizer);
            results.push_back(model->weight.detach().clone());
          }
        }
        CHECK(results[0].isfinite().all().item<bool>());
        CHECK(torch::equal(results[0], results[1]));
        torch::manual_seed(3);
        CHECK_FALSE(torch::equal(results[0], torch::nn::Linear(8, 4)->weight));
      }
    }
  }
}
