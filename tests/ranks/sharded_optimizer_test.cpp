#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <limits>

#include <ddpkit/error.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/fused_sgd.h>
#include <ddpkit/optim/grad_scaler.h>
#include <ddpkit/optim/sharded_optimizer.h>
#include <ddpkit/parallel/distributed_data_parallel.h>
#include <ddpkit/parallel/join.h>

#include "ranks/comparisons.h"
#include "support/catch.h"
#include "support/folder.h"
#include "support/ranks.h"

using ddpkit::DistributedDataParallel;
using ddpkit::DistributedDataParallelOptions;
using ddpkit::InvalidArgument;
using ddpkit::ProcessGroup;
using ddpkit::optim::FusedAdamW;
using ddpkit::optim::FusedSGD;
using ddpkit::optim::ShardedOptimizer;
using ddpkit::optim::ShardedOptions;
using ddpkit::testing::check_same_bits_on_all_ranks;

namespace {

constexpr std::int64_t kWidth = 70;  // The layers' sizes are not multiples of cache lines or ranks.

torch::nn::Sequential make_model(torch::Dtype dtype = torch::kDouble) {
  torch::manual_seed(3);
  torch::nn::Sequential model(torch::nn::Linear(kWidth, 3 * kWidth), torch::nn::Tanh(),
                              torch::nn::Linear(3 * kWidth, kWidth), torch::nn::Tanh(), torch::nn::Linear(kWidth, 3));
  model->to(dtype);
  return model;
}

torch::Tensor input(std::int64_t step, int rank, torch::Dtype dtype = torch::kDouble) {
  torch::manual_seed(static_cast<std::uint64_t>(1000 * step + rank));
  return torch::randn({4, kWidth}, dtype);
}

torch::Tensor loss_of(const torch::Tensor& output) { return (output - 1).pow(2).mean(); }

/// Trains one step in one process on the joined batch.
void step_alone(torch::nn::Sequential& model, torch::optim::Optimizer& optimizer, std::int64_t step, int ranks,
                double max_norm = 0) {
  std::vector<torch::Tensor> inputs;
  for (int r = 0; r < ranks; ++r) inputs.push_back(input(step, r));
  optimizer.zero_grad();
  loss_of(model->forward(torch::cat(inputs))).backward();
  if (max_norm > 0) torch::nn::utils::clip_grad_norm_(model->parameters(), max_norm);
  optimizer.step();
}

template <class Ddp, class Optimizer>
void step_sharded(Ddp& ddp, Optimizer& optimizer, std::int64_t step) {
  optimizer.zero_grad();
  loss_of(ddp(input(step, ddp.group().rank()))).backward();
  optimizer.step();
}

void check_equal(const torch::nn::Sequential& model, const torch::nn::Sequential& reference, double tolerance = 1e-10) {
  for (std::size_t i = 0; i < model->parameters().size(); ++i) {
    INFO("parameter " << i << " differs by "
                      << (model->parameters()[i] - reference->parameters()[i]).abs().max().item<double>());
    CHECK(at::allclose(model->parameters()[i], reference->parameters()[i], 0, tolerance));
  }
}

/// Returns all training modes: what the ranks shard, and when they update.
std::vector<ShardedOptions> ways(const ProcessGroup& group) {
  std::vector<ShardedOptions> all = {{.shared_weights = false}, {.shared_weights = false, .update_in_backward = true}};
  if (group.backend_name() == "shm" && group.world_size() > 1) {
    all.push_back({.shared_weights = true});
    all.push_back({.shared_weights = true, .update_in_backward = true});
  }
  return all;
}

template <class Inner, class Alone, class Options>
void check_trains_as_alone(ProcessGroup& group, const Options& optimizer_options,
                           const DistributedDataParallelOptions& ddp_options = {}) {
  auto reference = make_model();
  Alone alone(reference->parameters(), optimizer_options);
  for (std::int64_t step = 0; step < 20; ++step) step_alone(reference, alone, step, group.world_size());
  for (const ShardedOptions& options : ways(group)) {
    INFO("shared " << options.shared_weights << ", in backward " << options.update_in_backward);
    auto model = make_model();
    DistributedDataParallel ddp(model, group, ddp_options);
    ShardedOptimizer<Inner> optimizer(ddp, optimizer_options, options);
    CHECK(optimizer.has_shared_weights() == options.shared_weights);
    for (std::int64_t step = 0; step < 20; ++step) step_sharded(ddp, optimizer, step);
    check_equal(model, reference);
    check_same_bits_on_all_ranks(group, *model);
    for (const torch::Tensor& parameter : model->parameters()) CHECK_FALSE(parameter.grad().defined());
  }
}

}  // namespace

RANK_TEST("a sharded AdamW trains as one process on the joined batch", "[optim][sharded]", 1, 2, 3) {
  const auto options = torch::optim::AdamWOptions(1e-2).weight_decay(0.1);
  check_trains_as_alone<FusedAdamW, torch::optim::AdamW>(group, options);
  check_trains_as_alone<FusedAdamW, torch::optim::AdamW>(
      group, options, {.bucket_cap_mb = 0.01, .first_bucket_cap_mb = 0.01, .arena = false});
  check_trains_as_alone<FusedAdamW, torch::optim::AdamW>(group, options, {.static_graph = true});
}

RANK_TEST("a sharded SGD trains as one process on the joined batch", "[optim][sharded]", 2, 3) {
  check_trains_as_alone<FusedSGD, torch::optim::SGD>(
      group, torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01), {.find_unused_parameters = true});
}

TEST_CASE("a sharded AdamW through gloo", "[ranks][optim][sharded][gloo]") {
  ddpkit::testing::on_ranks(
      "a sharded AdamW through gloo", {2, 3},
      [](ProcessGroup& group) {
        check_trains_as_alone<FusedAdamW, torch::optim::AdamW>(group, torch::optim::AdamWOptions(1e-2),
                                                               {.bucket_cap_mb = 0.05});
        auto model = make_model();
        DistributedDataParallel ddp(model, group);
        CHECK_THROWS_WITH((ShardedOptimizer<FusedAdamW>(ddp, torch::optim::AdamWOptions(), {.shared_weights = true})),
                          ContainsSubstring("needs the shm backend"));
      },
      {.backend = "gloo"});
}

RANK_TEST("a sharded optimizer accumulates under no_sync and over several backwards", "[optim][sharded]", 2) {
  for (const ShardedOptions& options : ways(group)) {
    if (options.update_in_backward) continue;
    auto model = make_model();
    auto reference = make_model();
    DistributedDataParallel ddp(model, group);
    ShardedOptimizer<FusedSGD> optimizer(ddp, torch::optim::SGDOptions(0.1), options);
    torch::optim::SGD alone(reference->parameters(), torch::optim::SGDOptions(0.1));
    for (std::int64_t step = 0; step < 6; step += 3) {
      optimizer.zero_grad();
      {
        const auto no_sync = ddp.no_sync();
        loss_of(ddp(input(step, group.rank()))).backward();
      }
      loss_of(ddp(input(step + 1, group.rank()))).backward();
      loss_of(ddp(input(step + 2, group.rank()))).backward();
      optimizer.step();
      alone.zero_grad();
      for (std::int64_t part = step; part < step + 3; ++part) {
        for (int r = 0; r < group.world_size(); ++r)
          (loss_of(reference->forward(input(part, r))) / group.world_size()).backward();
      }
      alone.step();
    }
    check_equal(model, reference);
  }
}

RANK_TEST("a sharded optimizer clips by the norm of all gradients of all ranks", "[optim][sharded]", 1, 2, 3) {
  for (const ShardedOptions& options : ways(group)) {
    auto model = make_model();
    auto reference = make_model();
    DistributedDataParallel ddp(model, group);
    ShardedOptimizer<FusedSGD> optimizer(ddp, torch::optim::SGDOptions(0.5), options);
    torch::optim::SGD alone(reference->parameters(), torch::optim::SGDOptions(0.5));
    if (options.update_in_backward) {
      CHECK_THROWS_AS(optimizer.clip_grad_norm(1.0), InvalidArgument);
      continue;
    }
    for (std::int64_t step = 0; step < 5; ++step) {
      step_alone(reference, alone, step, group.world_size(), 0.1);
      optimizer.zero_grad();
      loss_of(ddp(input(step, group.rank()))).backward();
      const double norm = optimizer.clip_grad_norm(0.1);
      CHECK(norm > 0.1);
      const auto norms = group.all_gather(torch::tensor({norm}, torch::kDouble));
      CHECK(norms.max().item<double>() == norms.min().item<double>());
      optimizer.step();
    }
    check_equal(model, reference, 1e-9);  // Like torch, clipping adds 1e-6 to the norm that it divides by.
  }
}

RANK_TEST("clipping and zero_grad() of a sharded optimizer by its base, and beside it", "[optim][sharded]", 1, 2, 3) {
  for (const ShardedOptions& options : ways(group)) {
    if (options.update_in_backward) continue;
    auto model = make_model();
    auto reference = make_model();
    DistributedDataParallel ddp(model, group);
    ShardedOptimizer<FusedSGD> optimizer(ddp, torch::optim::SGDOptions(0.5), options);
    torch::optim::Optimizer& base = optimizer;
    torch::optim::SGD alone(reference->parameters(), torch::optim::SGDOptions(0.5));
    for (const bool set_to_none : {true, false}) {
      loss_of(ddp(input(0, group.rank()))).backward();
      optimizer.clip_grad_norm(1e-3);  // The program does not call step().
      base.zero_grad(set_to_none);     // Not virtual.
      loss_of(ddp(input(1, group.rank()))).backward();
      // A parameter's gradient is spread over the slices of all ranks.
      CHECK_THROWS_WITH(ddpkit::optim::clip_grad_norm_(model->parameters(), 1.0),
                        ContainsSubstring("clip_grad_norm() of that optimizer"));
      optimizer.step();
      step_alone(reference, alone, 1, group.world_size(), 0);
      check_equal(model, reference);
    }
  }
}

RANK_TEST("a sharded optimizer groups a weight under two names once", "[optim][sharded]", 2) {
  auto model = make_model();
  DistributedDataParallel ddp(model, group);
  auto twice = model->parameters();
  twice.push_back(twice.front());
  ShardedOptimizer<FusedSGD> optimizer(ddp, {torch::optim::OptimizerParamGroup(twice)}, torch::optim::SGDOptions(0.5));
  CHECK(optimizer.param_groups()[0].params().size() == model->parameters().size());
}

RANK_TEST("an overflow in one rank's gradients skips a sharded step on all", "[optim][sharded]", 2, 3) {
  for (const ShardedOptions& options : ways(group)) {
    if (options.update_in_backward) continue;
    auto model = make_model(torch::kFloat);
    DistributedDataParallel ddp(model, group);
    ShardedOptimizer<FusedAdamW> optimizer(ddp, torch::optim::AdamWOptions(1e-2), options);
    ddpkit::optim::GradScaler alone;
    ddpkit::optim::GradScaler scaler(group, {.init_scale = 1024});
    const auto before = model->parameters()[0].clone();
    const auto train = [&](bool overflow) {
      optimizer.zero_grad();
      torch::Tensor loss = scaler.scale(loss_of(ddp(input(0, group.rank(), torch::kFloat))));
      if (overflow && group.rank() == 1) loss = loss * std::numeric_limits<float>::infinity();
      loss.backward();
      const bool stepped = scaler.step(optimizer);
      scaler.update();
      return stepped;
    };
    CHECK_FALSE(train(true));
    CHECK(torch::equal(model->parameters()[0], before));
    CHECK(scaler.get_scale() == 512);
    CHECK(train(false));
    CHECK_FALSE(torch::equal(model->parameters()[0], before));
    check_same_bits_on_all_ranks(group, *model);
    CHECK_THROWS_WITH(alone.step(optimizer), ContainsSubstring("give GradScaler the process group"));
  }
}

RANK_TEST("a write by all ranks to shared weights is applied once", "[optim][sharded]", 2, 3) {
  for (const bool in_backward : {false, true}) {
    auto model = make_model();
    auto reference = make_model();
    DistributedDataParallel ddp(model, group);
    const ShardedOptions options{.shared_weights = true, .update_in_backward = in_backward};
    ShardedOptimizer<FusedSGD> optimizer(ddp, torch::optim::SGDOptions(0.1), options);
    torch::optim::SGD alone(reference->parameters(), torch::optim::SGDOptions(0.1));
    for (std::int64_t step = 0; step < 6; ++step) {
      step_alone(reference, alone, step, group.world_size());
      step_sharded(ddp, optimizer, step);
      for (const auto& changed : {model, reference}) {
        const torch::NoGradGuard no_grad;
        // With and without autograd's version counter, in a part of a tensor, and through a plain pointer.
        if (step == 1) changed->parameters()[0].mul_(0.5);
        if (step == 2) changed->parameters()[2].data().clamp_(-0.01, 0.01);
        if (step == 3) changed->parameters()[2][7].zero_();
        if (step == 4) changed->parameters()[1].data_ptr<double>()[5] += 1;
      }
      check_equal(model, reference);
      check_same_bits_on_all_ranks(group, *model);
      group.barrier();
    }
  }
}

RANK_TEST("ranks that write different values to shared weights get an error", "[optim][sharded]", 2, 3) {
  for (const bool in_backward : {false, true}) {
    auto model = make_model();
    const auto own = ddpkit::testing::another_group(group, in_backward ? "in backward" : "in step");
    DistributedDataParallel ddp(model, own);
    ShardedOptimizer<FusedSGD> optimizer(ddp, torch::optim::SGDOptions(0.1),
                                         {.shared_weights = true, .update_in_backward = in_backward});
    step_sharded(ddp, optimizer, 0);
    if (group.rank() == 1) {
      const torch::NoGradGuard no_grad;
      model->parameters()[2].mul_(0.5);
    }
    CHECK_THROWS_WITH(step_sharded(ddp, optimizer, 1),
                      ContainsSubstring("2.weight") && ContainsSubstring("differs between rank 0 and rank 1"));
  }
}

TEST_CASE("a sharded optimizer's state moves between world sizes", "[ranks][optim][sharded]") {
  constexpr const char* kName = "a sharded optimizer's state moves between world sizes";
  // The same 12 samples per step on any number of ranks: rank r takes every world_size-th sample.
  const auto batch = [](std::int64_t step, const ProcessGroup& group) {
    torch::manual_seed(static_cast<std::uint64_t>(step));
    return torch::randn({12, kWidth}, torch::kDouble).chunk(group.world_size())[static_cast<std::size_t>(group.rank())];
  };
  // The 3 ranks read the checkpoint that the 2 ranks wrote.
  const ddpkit::testing::Folder made;
  const char* given = std::getenv("DDPKIT_TEST_STATE");
  const std::filesystem::path folder = given ? std::filesystem::path(given) : made.path();
  const ddpkit::testing::RankTestOptions environment{.environment = {{"DDPKIT_TEST_STATE", folder.string()}}};
  const auto options = torch::optim::AdamWOptions(1e-2).amsgrad(true);
  const auto run = [&](ProcessGroup& group, const ShardedOptions& how, std::int64_t from, std::int64_t to, bool load,
                       bool save) {
    auto model = make_model();
    DistributedDataParallel ddp(model, group);
    ShardedOptimizer<FusedAdamW> optimizer(ddp, options, how);
    if (load) {
      torch::load(model, (folder / "model.pt").string());
      torch::load(optimizer, (folder / "optimizer.pt").string());
      CHECK(optimizer.param_groups()[0].options().get_lr() == 0.03);
    }
    for (std::int64_t step = from; step < to; ++step) {
      optimizer.zero_grad();
      loss_of(ddp(batch(step, group))).backward();
      optimizer.step();
    }
    if (save) {
      optimizer.param_groups()[0].options().set_lr(0.03);
      CHECK_THROWS_WITH(torch::save(optimizer, (folder / "unused.pt").string()),
                        ContainsSubstring("consolidate_state()"));
      optimizer.consolidate_state();
      if (group.rank() == 0) {
        torch::save(model, (folder / "model.pt").string());
        torch::save(optimizer, (folder / "optimizer.pt").string());
      }
      group.barrier();
    }
    return model;
  };
  ddpkit::testing::on_ranks(
      kName, {2},
      [&](ProcessGroup& group) {
        run(group, {}, 0, 5, false, true);
        // On the same number of ranks, training resumes; torch's optimizer reads the saved state too.
        const auto whole = run(group, {.shared_weights = false}, 5, 15, true, false);
        auto reference = make_model();
        torch::optim::AdamW alone(reference->parameters(), options);
        torch::load(reference, (folder / "model.pt").string());
        torch::load(alone, (folder / "optimizer.pt").string());
        for (std::int64_t step = 5; step < 15; ++step) {
          torch::manual_seed(static_cast<std::uint64_t>(step));
          alone.zero_grad();
          loss_of(reference->forward(torch::randn({12, kWidth}, torch::kDouble))).backward();
          alone.step();
        }
        check_equal(whole, reference, 1e-9);
        for (const int ranks : {1, 2}) {
          if (auto part = group.split(ranks == 1 ? std::vector<int>{0} : std::vector<int>{0, 1})) {
            for (const ShardedOptions& how : ways(*part))
              check_equal(run(*part, how, 5, 15, true, false), reference, 1e-9);
          }
        }
      },
      environment);
  ddpkit::testing::on_ranks(
      kName, {3},
      [&](ProcessGroup& group) {
        auto reference = make_model();
        torch::optim::AdamW alone(reference->parameters(), options);
        torch::load(reference, (folder / "model.pt").string());
        torch::load(alone, (folder / "optimizer.pt").string());
        for (std::int64_t step = 5; step < 15; ++step) {
          torch::manual_seed(static_cast<std::uint64_t>(step));
          alone.zero_grad();
          loss_of(reference->forward(torch::randn({12, kWidth}, torch::kDouble))).backward();
          alone.step();
        }
        for (const ShardedOptions& how : ways(group)) check_equal(run(group, how, 5, 15, true, false), reference, 1e-9);
      },
      environment);
}

RANK_TEST("a sharded optimizer's consolidated state ends with the next step", "[optim][sharded]", 2) {
  auto model = make_model();
  DistributedDataParallel ddp(model, group);
  ShardedOptimizer<FusedAdamW> optimizer(ddp, torch::optim::AdamWOptions(1e-2));
  const auto step = [&] {
    optimizer.zero_grad();
    loss_of(ddp(torch::ones({3, kWidth}, torch::kDouble))).backward();
    optimizer.step();
  };
  step();
  // The rate of this type's default, which LibTorch 2.15 replaces in constructors.
  optimizer.param_groups()[0].options().set_lr(torch::optim::AdamWOptions().lr());
  optimizer.consolidate_state();
  if (group.rank() == 0)
    CHECK(optimizer.consolidated().param_groups()[0].options().get_lr() == torch::optim::AdamWOptions().lr());
  step();
  CHECK_THROWS_WITH(optimizer.consolidated(), ContainsSubstring("consolidate_state()"));
}

RANK_TEST("a sharded optimizer cuts buckets, not parameters, and keeps them", "[optim][sharded]", 2, 3) {
  torch::manual_seed(3);
  torch::nn::Sequential model;
  for (int layer = 0; layer < 30; ++layer) model->push_back(torch::nn::Linear(4, 4));  // 16 and 4 elements.
  DistributedDataParallel ddp(model, group);
  ShardedOptimizer<FusedSGD> optimizer(ddp, torch::optim::SGDOptions(0.1));
  const auto buckets = ddp.reducer().buckets();
  std::int64_t own = 0, all = 0;
  for (const torch::Tensor& piece : optimizer.param_groups()[0].params()) own += piece.numel();
  for (const torch::Tensor& parameter : model->parameters()) all += parameter.numel();
  CHECK(std::abs(own - all / group.world_size()) <= 32);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    loss_of(ddp(torch::full({2, 4}, group.rank() + step, torch::kFloat))).backward();
    optimizer.step();
    CHECK(ddp.reducer().buckets() == buckets);
  }
  CHECK(ddp.stats().rebuilds == 0);
  check_same_bits_on_all_ranks(group, *model);
}

RANK_TEST("join with a sharded optimizer", "[optim][sharded][join]", 2, 3) {
  for (const ShardedOptions& options : ways(group)) {
    auto model = make_model();
    auto reference = make_model();
    torch::optim::SGD alone(reference->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (std::int64_t step = 0; step < 2 + 2 * (group.world_size() - 1); ++step) {
      alone.zero_grad();
      for (int r = 0; r < group.world_size(); ++r) {
        if (step < 2 + 2 * r) (loss_of(reference->forward(input(step, r))) / group.world_size()).backward();
      }
      alone.step();
    }
    DistributedDataParallel ddp(model, group);
    ShardedOptimizer<FusedSGD> optimizer(ddp, torch::optim::SGDOptions(0.1).momentum(0.9), options);
    ddpkit::join({ddp, optimizer}, [&] {
      for (std::int64_t step = 0; step < 2 + 2 * group.rank(); ++step) step_sharded(ddp, optimizer, step);
    });
    check_equal(model, reference);
    check_same_bits_on_all_ranks(group, *model);
  }
}

RANK_TEST("a sharded optimizer refuses what it cannot do, in words", "[optim][sharded]", 2) {
  auto model = make_model();
  DistributedDataParallel ddp(model, group);
  const torch::optim::SGDOptions sgd(0.1);
  using torch::optim::OptimizerParamGroup;
  CHECK_THROWS_WITH((ShardedOptimizer<FusedSGD>(ddp, std::vector{OptimizerParamGroup({model->parameters()[0]})}, sgd)),
                    ContainsSubstring("is in no parameter group"));
  CHECK_THROWS_WITH(
      (ShardedOptimizer<FusedSGD>(
          ddp, std::vector{OptimizerParamGroup(model->parameters()), OptimizerParamGroup({torch::ones({2})})}, sgd)),
      ContainsSubstring("none of the parameters"));
  {
    ShardedOptimizer<FusedSGD> optimizer(ddp, sgd);
    CHECK_THROWS_WITH(optimizer.step([] { return torch::Tensor(); }), ContainsSubstring("no closure"));
    CHECK_THROWS_WITH(ddp.register_comm_hook([](ddpkit::GradBucket&) { return ddpkit::BucketReduction{}; }),
                      ContainsSubstring("sharded"));
  }
  // Another optimizer can train the model.
  torch::optim::SGD plain(model->parameters(), sgd);
  auto reference = make_model();
  torch::optim::SGD alone(reference->parameters(), sgd);
  for (std::int64_t step = 0; step < 3; ++step) {
    step_alone(reference, alone, step, group.world_size());
    step_sharded(ddp, plain, step);
  }
  check_equal(model, reference);
  ShardedOptimizer<FusedSGD> again(ddp, sgd);
  model->to(torch::kFloat);
  CHECK_THROWS_WITH(again.step(), ContainsSubstring("has become a Float tensor"));
}
