#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/fused_sgd.h>
#include <ddpkit/optim/join_state.h>
#include <ddpkit/optim/learning_rate.h>
#include <ddpkit/parallel/distributed_data_parallel.h>
#include <ddpkit/parallel/join.h>
#include <ddpkit/parallel/sync_batch_norm.h>

#include "ranks/branches.h"
#include "ranks/comparisons.h"
#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::DistributedDataParallel;
using ddpkit::DistributedDataParallelOptions;
using ddpkit::JoinOptions;
using ddpkit::ProcessGroup;
using ddpkit::testing::check_same_bits_on_all_ranks;
using ddpkit::testing::flat_parameters;
using ddpkit::testing::largest_difference;

namespace {

constexpr std::int64_t kFeatures = 30;

torch::Tensor uneven_input(std::int64_t step, int rank) {
  torch::manual_seed(static_cast<std::uint64_t>(1000 * step + rank));
  return torch::randn({4 + rank, kFeatures}, torch::kDouble);
}

/// Rank 0 has the fewest steps. The rank whose buffers normally count therefore finishes first.
std::int64_t steps_of(int rank) { return 2 + 2 * rank; }

template <class Norm>
torch::nn::Sequential make_model(const Norm& norm) {
  torch::manual_seed(3);
  torch::nn::Sequential model(torch::nn::Linear(kFeatures, kFeatures), norm, torch::nn::Tanh(),
                              torch::nn::Linear(kFeatures, kFeatures));
  model->to(torch::kDouble);
  return model;
}

torch::nn::Sequential with_sync_batch_norm(const ProcessGroup& group) {
  return make_model(ddpkit::SyncBatchNorm(torch::nn::BatchNormOptions(kFeatures), group));
}

/// A model, and all its weights after each step.
struct Trained {
  torch::nn::Sequential model;
  std::vector<torch::Tensor> weights = {};  ///< [step]
};

/// One process computes all ranks: batch norm sees the inputs of all ranks that have inputs; `divisor` divides
/// gradients.
Trained train_alone(int ranks, bool divide_by_all) {
  Trained alone{make_model(torch::nn::BatchNorm1d(kFeatures))};
  torch::nn::Sequential& model = alone.model;
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (std::int64_t step = 0; step < steps_of(ranks - 1); ++step) {
    std::vector<torch::Tensor> inputs;
    std::vector<std::int64_t> rows;
    for (int r = 0; r < ranks; ++r) {
      if (step >= steps_of(r)) continue;
      inputs.push_back(uneven_input(step, r));
      rows.push_back(inputs.back().size(0));
    }
    const double divisor = divide_by_all ? ranks : static_cast<double>(inputs.size());
    const auto outputs = model->forward(torch::cat(inputs)).split_with_sizes(rows);
    torch::Tensor loss = torch::zeros({}, torch::kDouble);
    for (const auto& output : outputs) loss = loss + output.pow(2).mean() / divisor;
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    alone.weights.push_back(flat_parameters(*model));
  }
  return alone;
}

/// Trains ranks with different numbers of steps. Returns this rank's weights after each step. join broadcasts one
/// rank's weights when it ends, so the weights at the end would not show differences. [step]
template <class Model>
std::vector<torch::Tensor> train_joined(Model& model, ProcessGroup& group,
                                        const DistributedDataParallelOptions& options,
                                        const JoinOptions& join_options) {
  std::vector<torch::Tensor> weights;
  DistributedDataParallel ddp(model, group, options);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  std::int64_t done = 0;
  ddpkit::join(
      ddp,
      [&] {
        for (std::int64_t step = 0; step < steps_of(group.rank()); ++step, ++done) {
          optimizer.zero_grad();
          ddp(uneven_input(step, group.rank())).pow(2).mean().backward();
          optimizer.step();
          weights.push_back(flat_parameters(*model));
        }
      },
      join_options);
  CHECK(done == steps_of(group.rank()));
  return weights;
}

void check_weights(const std::vector<torch::Tensor>& weights, const Trained& alone, const ProcessGroup& group) {
  REQUIRE(weights.size() <= alone.weights.size());
  for (std::size_t step = 0; step < weights.size(); ++step)
    CHECK(largest_difference(weights[step], alone.weights[step]) < 1e-10);
  for (std::size_t step = 0; step < static_cast<std::size_t>(steps_of(0)); ++step)
    check_same_bits_on_all_ranks(group, weights[step]);
}

void check_end(const torch::nn::Sequential& model, const Trained& alone, const ProcessGroup& group) {
  CHECK(largest_difference(flat_parameters(*model), alone.weights.back()) < 1e-10);
  for (std::size_t i = 0; i < model->buffers().size(); ++i)
    CHECK(at::allclose(model->buffers()[i], alone.model->buffers()[i], 0, 1e-10));
  check_same_bits_on_all_ranks(group, *model);
}

}  // namespace

RANK_TEST("join: uneven inputs, with SyncBatchNorm in forward and backward", "[ddp][join]", 2, 3) {
  for (const bool divide_by_all : {true, false}) {
    const auto reference = train_alone(group.world_size(), divide_by_all);
    for (const DistributedDataParallelOptions& options :
         {DistributedDataParallelOptions{},
          DistributedDataParallelOptions{.bucket_cap_mb = 0.005, .first_bucket_cap_mb = 0.005, .arena = false},
          DistributedDataParallelOptions{.find_unused_parameters = true},
          DistributedDataParallelOptions{.static_graph = true, .gradient_as_bucket_view = true}}) {
      auto model = with_sync_batch_norm(group);
      check_weights(train_joined(model, group, options, {.divide_by_initial_world_size = divide_by_all}), reference,
                    group);
      check_end(model, reference, group);
    }
  }
}

RANK_TEST("join: plain batch norm's buffers come from a rank that still trains", "[ddp][join]", 2, 3) {
  auto model = make_model(torch::nn::BatchNorm1d(kFeatures));
  const auto weights = train_joined(model, group, {}, {});
  check_same_bits_on_all_ranks(group, *model);
  for (std::size_t step = 0; step < static_cast<std::size_t>(steps_of(0)); ++step)
    check_same_bits_on_all_ranks(group, weights[step]);

  // One process computes all ranks: each step begins with the buffers of the first rank that still has inputs.
  auto alone = make_model(torch::nn::BatchNorm1d(kFeatures));
  torch::optim::SGD optimizer(alone->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const auto copies = [](const std::vector<torch::Tensor>& tensors) {
    std::vector<torch::Tensor> clones;
    for (const auto& tensor : tensors) clones.push_back(tensor.clone());
    return clones;
  };
  const auto restore = [&alone](const std::vector<torch::Tensor>& values) {
    for (std::size_t i = 0; i < values.size(); ++i) alone->buffers()[i].copy_(values[i]);
  };
  std::vector<std::vector<torch::Tensor>> buffers(static_cast<std::size_t>(group.world_size()),
                                                  copies(alone->buffers()));  // [rank][buffer]
  for (std::int64_t step = 0; step < steps_of(group.world_size() - 1); ++step) {
    std::vector<torch::Tensor> before;
    optimizer.zero_grad();
    for (int r = 0; r < group.world_size(); ++r) {
      if (step >= steps_of(r)) continue;
      auto& of_rank = buffers[static_cast<std::size_t>(r)];
      if (before.empty()) before = of_rank;
      restore(before);
      (alone->forward(uneven_input(step, r)).pow(2).mean() / group.world_size()).backward();
      of_rank = copies(alone->buffers());
    }
    optimizer.step();
    if (step < steps_of(group.rank()))
      CHECK(largest_difference(weights[static_cast<std::size_t>(step)], flat_parameters(*alone)) < 1e-10);
  }
  CHECK(largest_difference(flat_parameters(*model), flat_parameters(*alone)) < 1e-10);
  for (std::size_t i = 0; i < model->buffers().size(); ++i)
    CHECK(at::allclose(model->buffers()[i], buffers.back()[i], 0, 1e-10));
}

RANK_TEST("join: buffers come from the rank with most inputs, though its parameters are frozen", "[ddp][join]", 2, 3) {
  auto model = make_model(torch::nn::BatchNorm1d(kFeatures));
  DistributedDataParallel ddp(model, group, {.broadcast_buffers = false});
  for (const torch::Tensor& parameter : model->parameters()) parameter.set_requires_grad(false);
  std::vector<torch::Tensor> own;
  ddpkit::join(ddp, [&] {
    for (std::int64_t step = 0; step < steps_of(group.rank()); ++step) ddp(uneven_input(step, group.rank()));
    for (const torch::Tensor& buffer : model->buffers()) own.push_back(buffer.clone());
  });
  check_same_bits_on_all_ranks(group, *model);
  for (std::size_t i = 0; i < own.size() && group.rank() == group.world_size() - 1; ++i)
    CHECK(torch::equal(model->buffers()[i], own[i]));
}

RANK_TEST("join: a rank without any input, and all ranks with the same number", "[ddp][join]", 2, 3) {
  for (const bool even : {true, false}) {
    const auto has_input = [even](int rank) { return even || rank == 1; };
    auto model = with_sync_batch_norm(group);
    DistributedDataParallel ddp(model, group);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    std::vector<torch::Tensor> weights;
    ddpkit::join(ddp, [&] {
      for (std::int64_t step = 0; step < (has_input(group.rank()) ? 3 : 0); ++step) {
        optimizer.zero_grad();
        ddp(uneven_input(step, group.rank())).pow(2).mean().backward();
        optimizer.step();
        weights.push_back(flat_parameters(*model));
      }
    });
    auto alone = make_model(torch::nn::BatchNorm1d(kFeatures));
    torch::optim::SGD of_alone(alone->parameters(), 0.1);
    for (std::int64_t step = 0; step < 3; ++step) {
      std::vector<torch::Tensor> inputs;
      std::vector<std::int64_t> rows;
      for (int r = 0; r < group.world_size(); ++r) {
        if (!has_input(r)) continue;
        inputs.push_back(uneven_input(step, r));
        rows.push_back(inputs.back().size(0));
      }
      of_alone.zero_grad();
      torch::Tensor loss = torch::zeros({}, torch::kDouble);
      for (const auto& output : alone->forward(torch::cat(inputs)).split_with_sizes(rows))
        loss = loss + output.pow(2).mean() / group.world_size();
      loss.backward();
      of_alone.step();
      if (has_input(group.rank()))
        CHECK(largest_difference(weights[static_cast<std::size_t>(step)], flat_parameters(*alone)) < 1e-10);
    }
    CHECK(largest_difference(flat_parameters(*model), flat_parameters(*alone)) < 1e-10);
    check_same_bits_on_all_ranks(group, *model);
  }
}

/// Runs several joins in sequence, in which rank 0 ends early. Compares weights after the loop and before join ends,
/// because join broadcasts the weights.
template <class Optimizer, class Options>
void check_joins_in_a_row(const ProcessGroup& group, const Options& options) {
  auto model = make_model(torch::nn::BatchNorm1d(kFeatures));
  DistributedDataParallel ddp(model, group);
  Optimizer optimizer(model->parameters(), options);
  ddpkit::optim::LearningRateScheduler scheduler(optimizer, ddpkit::optim::step_decay(1, 0.9));
  ddpkit::optim::JoinState state(ddp, optimizer, scheduler);
  torch::Tensor weights;
  const auto epoch = [&](std::int64_t steps) {
    ddpkit::join({ddp, state}, [&] {
      for (std::int64_t step = 0; step < steps; ++step) {
        optimizer.zero_grad();
        ddp(uneven_input(step, group.rank())).pow(2).mean().backward();
        optimizer.step();
        scheduler.step();
      }
      weights = flat_parameters(*model);
    });
  };
  epoch(2);
  check_same_bits_on_all_ranks(group, weights);
  for (int join = 0; join < 2; ++join) {
    epoch(steps_of(group.rank()));
    check_same_bits_on_all_ranks(group, flat_parameters(*model));
    CHECK(scheduler.steps() == 2 + (join + 1) * steps_of(group.world_size() - 1) + join);
    epoch(1);
    check_same_bits_on_all_ranks(group, weights);
  }
}

RANK_TEST("join: ranks that ended early take the state of optimizers and schedules", "[ddp][join][optim]", 2, 3) {
  check_joins_in_a_row<torch::optim::Adam>(group, torch::optim::AdamOptions(0.01));
  check_joins_in_a_row<torch::optim::RMSprop>(group, torch::optim::RMSpropOptions(0.01).momentum(0.9));
  check_joins_in_a_row<ddpkit::optim::FusedAdamW>(group, torch::optim::AdamWOptions(0.01).amsgrad(true));
  check_joins_in_a_row<ddpkit::optim::FusedSGD>(group, torch::optim::SGDOptions(0.01).momentum(0.9));
}

RANK_TEST("join: a gradient that no rank has used is not divided", "[ddp][join]", 2, 3) {
  ddpkit::testing::Branches model;
  DistributedDataParallel ddp(model, group, {.find_unused_parameters = true});
  const auto backward = [&](std::int64_t step, const char* branches) {
    ddp(ddpkit::testing::input(step, group.rank()), branches).sum().backward();
  };
  const auto loop = [&] {
    backward(0, "lr");
    const torch::Tensor before = model->right->weight.grad().clone();
    if (group.rank() == 0) return;
    backward(1, "l");
    CHECK(torch::equal(model->right->weight.grad(), before));
  };
  ddpkit::join(ddp, loop, {.divide_by_initial_world_size = false});
}

RANK_TEST("join: an error of one rank's JoinState is an error on all ranks", "[ddp][join][optim]", 2, 3) {
  auto model = make_model(torch::nn::Identity()), other = make_model(torch::nn::Identity());
  DistributedDataParallel ddp(model, group);
  torch::optim::SGD averaged(model->parameters(), 0.1), not_averaged(other->parameters(), 0.1);
  torch::optim::Adam adam(model->parameters(), 0.1);
  const bool is_odd = group.rank() == 1;
  const auto make = [&](torch::optim::Optimizer& optimizer) { const ddpkit::optim::JoinState state(ddp, optimizer); };
  CHECK_THROWS_WITH(make(is_odd ? not_averaged : averaged), ContainsSubstring("does not average a parameter"));
  CHECK_THROWS_WITH(make(is_odd ? static_cast<torch::optim::Optimizer&>(adam) : averaged),
                    ContainsSubstring("JoinState differs between rank 0 and rank 1") && ContainsSubstring("Adam"));
  CHECK_NOTHROW(make(averaged));

  INFO("A frozen parameter that is not averaged: each rank has its own state of it, if any.");
  const torch::Tensor alone = torch::ones({2}, torch::requires_grad());
  auto parameters = model->parameters();
  parameters.push_back(alone);
  torch::optim::Adam with_state(parameters, 0.1), without_state(parameters, 0.1);
  alone.mutable_grad() = torch::ones({2});
  with_state.step();
  alone.set_requires_grad(false);
  CHECK_NOTHROW(make(without_state));
  CHECK_THROWS_WITH(make(with_state), ContainsSubstring("does not average a parameter"));
}

RANK_TEST("join: a state that one rank cannot save or load is an error on all", "[ddp][join][optim]", 2, 3) {
  struct Stubborn {
    bool saves, loads;
    void save(torch::serialize::OutputArchive&) const {
      if (!saves) throw std::runtime_error("no room to save");
    }
    void load(torch::serialize::InputArchive&) const {
      if (!loads) throw std::runtime_error("no room to load");
    }
  };
  for (const bool saves : {false, true}) {
    const auto own = ddpkit::testing::another_group(group, fmt::format("saves {}", saves));
    auto model = make_model(torch::nn::Identity());
    DistributedDataParallel ddp(model, own);
    Stubborn object{.saves = saves, .loads = group.rank() != 1};
    ddpkit::optim::JoinState state(ddp, object);
    const auto run = [&] {
      ddpkit::join({ddp, state}, [&] { ddp(uneven_input(0, group.rank())).pow(2).mean().backward(); });
    };
    CHECK_THROWS_WITH(run(), ContainsSubstring(saves ? "no room to load" : "no room to save"));
  }
}

RANK_TEST("join: throw_on_early_termination stops all ranks", "[ddp][join]", 2, 3) {
  auto model = with_sync_batch_norm(group);
  CHECK_THROWS_WITH(train_joined(model, group, {}, {.throw_on_early_termination = true}),
                    ContainsSubstring("run out of inputs"));
}

RANK_TEST("join: an error in one rank's loop reaches the others", "[ddp][join]", 2, 3) {
  auto model = with_sync_batch_norm(group);
  DistributedDataParallel ddp(model, group);
  const auto run = [&] {
    ddpkit::join(ddp, [&] {
      for (std::int64_t step = 0; step < 3; ++step) {
        if (group.rank() == 1 && step == 1) throw std::runtime_error("bad sample");
        ddp(uneven_input(step, group.rank())).pow(2).mean().backward();
      }
    });
  };
  CHECK_THROWS_WITH(run(), ContainsSubstring("bad sample"));
}

TEST_CASE("join through gloo", "[ranks][ddp][join][gloo]") {
  ddpkit::testing::on_ranks("join through gloo", {2},
                            [](ProcessGroup& group) {
                              const auto reference = train_alone(group.world_size(), true);
                              auto model = with_sync_batch_norm(group);
                              check_weights(train_joined(model, group, {}, {}), reference, group);
                              check_end(model, reference, group);
                            },
                            {.backend = "gloo"});
}

RANK_TEST("join: a static graph is learned in a backward of all ranks", "[ddp][join]", 2, 3) {
  // Rank 0 has no input in the first epoch.
  auto model = make_model(torch::nn::Identity()), reference = make_model(torch::nn::Identity());
  const auto forward = [](auto& net, std::int64_t step, int rank) {
    return net.forward(uneven_input(step, rank)).pow(2).mean();
  };
  DistributedDataParallel ddp(model, group,
                              {.bucket_cap_mb = 0.001, .first_bucket_cap_mb = 0.001, .static_graph = true});
  const auto epoch = [&](std::int64_t first_step, const std::function<std::int64_t(int)>& steps) {
    ddpkit::join(ddp, [&] {
      for (std::int64_t step = 0; step < steps(group.rank()); ++step) {
        model->zero_grad();
        reference->zero_grad();
        torch::Tensor loss = torch::zeros({}, torch::kDouble);
        for (int r = 0; r < group.world_size(); ++r)
          if (step < steps(r)) loss = loss + forward(*reference, first_step + step, r) / group.world_size();
        loss.backward();
        forward(ddp, first_step + step, group.rank()).backward();
        for (std::size_t i = 0; i < model->parameters().size(); ++i)
          CHECK(largest_difference(model->parameters()[i].grad(), reference->parameters()[i].grad()) < 1e-12);
      }
    });
  };
  epoch(0, [](int rank) { return rank == 0 ? 0 : 2; });
  epoch(10, [](int) { return 2; });
  CHECK(ddp.stats().buckets.at(0).started_us < ddp.stats().last_gradient_us);
  epoch(20, steps_of);
}
