#include <torch/torch.h>

#include <ddpkit/comm/error.h>
#include <ddpkit/parallel/distributed_data_parallel.h>
#include <ddpkit/parallel/join.h>
#include <ddpkit/parallel/sync_batch_norm.h>

#include "ranks/comparisons.h"
#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::DistributedDataParallel;
using ddpkit::DistributedDataParallelOptions;
using ddpkit::JoinOptions;
using ddpkit::ProcessGroup;
using ddpkit::testing::check_same_bits_on_all_ranks;

namespace {

constexpr std::int64_t kFeatures = 30;

torch::Tensor uneven_input(std::int64_t step, int rank) {
  torch::manual_seed(static_cast<std::uint64_t>(1000 * step + rank));
  return torch::randn({4 + rank, kFeatures}, torch::kDouble);
}

/// Rank 0 has the fewest steps, so that the one whose buffers count otherwise leaves first.
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

/// One process that plays all ranks: those with inputs are normalised together, their gradients divided by `divisor`.
torch::nn::Sequential train_alone(int ranks, bool divide_by_all) {
  auto model = make_model(torch::nn::BatchNorm1d(kFeatures));
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
  }
  return model;
}

/// Ranks with different numbers of steps.
template <class Model>
void train_joined(Model& model, ProcessGroup& group, const DistributedDataParallelOptions& options,
                  const JoinOptions& join_options) {
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
        }
      },
      join_options);
  CHECK(done == steps_of(group.rank()));
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
      train_joined(model, group, options, {.divide_by_initial_world_size = divide_by_all});
      for (std::size_t i = 0; i < model->parameters().size(); ++i)
        CHECK(at::allclose(model->parameters()[i], reference->parameters()[i], 0, 1e-10));
      for (std::size_t i = 0; i < model->buffers().size(); ++i)
        CHECK(at::allclose(model->buffers()[i], reference->buffers()[i], 0, 1e-10));
      check_same_bits_on_all_ranks(group, *model);
    }
  }
}

RANK_TEST("join: plain batch norm's buffers come from a rank that still trains", "[ddp][join]", 2, 3) {
  auto model = make_model(torch::nn::BatchNorm1d(kFeatures));
  train_joined(model, group, {}, {});
  check_same_bits_on_all_ranks(group, *model);
  // Rank 0 has left after two steps; the last rank has gone on counting.
  CHECK(model->named_buffers()["1.num_batches_tracked"].item<std::int64_t>() == steps_of(group.world_size() - 1));
}

RANK_TEST("join: a rank without any input, and all ranks with the same number", "[ddp][join]", 2, 3) {
  for (const bool even : {true, false}) {
    auto model = with_sync_batch_norm(group);
    DistributedDataParallel ddp(model, group);
    ddpkit::join(ddp, [&] {
      for (std::int64_t step = 0; step < (even || group.rank() == 1 ? 3 : 0); ++step)
        ddp(uneven_input(step, group.rank())).pow(2).mean().backward();
    });
    check_same_bits_on_all_ranks(group, *model);
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
                              train_joined(model, group, {}, {});
                              for (std::size_t i = 0; i < model->parameters().size(); ++i)
                                CHECK(at::allclose(model->parameters()[i], reference->parameters()[i], 0, 1e-10));
                              check_same_bits_on_all_ranks(group, *model);
                            },
                            {.backend = "gloo"});
}
