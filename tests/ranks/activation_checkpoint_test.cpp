#include <torch/torch.h>

#include <vector>

#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/sharded_optimizer.h>
#include <ddpkit/parallel/activation_checkpoint.h>
#include <ddpkit/parallel/distributed_data_parallel.h>

#include "ranks/comparisons.h"
#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::DistributedDataParallel, ddpkit::DistributedDataParallelOptions;
using ddpkit::optim::FusedAdamW, ddpkit::optim::ShardedOptimizer, ddpkit::optim::ShardedOptions;

namespace {

/// Blocks with dropout and batch norm, of which the first and the last share their weights. Rank 0 may skip one.
struct TowerImpl : torch::nn::Module {
  explicit TowerImpl(bool checkpoints) : checkpointed(checkpoints) {
    torch::manual_seed(4);
    for (int i = 0; i < 3; ++i) {
      blocks.push_back(register_module(
          "block" + std::to_string(i),
          torch::nn::Sequential(torch::nn::Linear(10, 30), torch::nn::BatchNorm1d(30), torch::nn::Tanh(),
                                torch::nn::Dropout(0.2), torch::nn::Linear(30, 10))));
    }
  }
  torch::Tensor forward(torch::Tensor x, bool skips = false) {
    for (const std::size_t i : {0, 1, 2, 0}) {
      if (skips && i == 1) continue;
      auto run = [block = blocks[i]](const torch::Tensor& y) mutable { return y + block->forward(y); };
      x = checkpointed ? ddpkit::activation_checkpoint(run, x) : run(x);
    }
    return x;
  }
  bool checkpointed;
  std::vector<torch::nn::Sequential> blocks;
};

torch::Tensor input(int step, int rank) {
  torch::manual_seed(100 * step + rank);
  return torch::randn({6, 10});
}

/// Returns the weights after some steps. [param]
template <class MakeOptimizer>
std::vector<torch::Tensor> trained(const ddpkit::ProcessGroup& group, bool checkpointed,
                                   const DistributedDataParallelOptions& options, const MakeOptimizer& make_optimizer) {
  const auto model = std::make_shared<TowerImpl>(checkpointed);
  DistributedDataParallel ddp(model, group, options);
  auto optimizer = make_optimizer(ddp);
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    if (!options.static_graph) {
      const auto accumulating = ddp.no_sync();
      ddp(input(50 + step, group.rank())).pow(2).mean().backward();
    }
    ddp(input(step, group.rank()), options.find_unused_parameters && group.rank() == 0).pow(2).mean().backward();
    optimizer.step();
  }
  std::vector<torch::Tensor> weights;
  for (const auto& parameter : model->parameters()) weights.push_back(parameter.detach().clone());
  return weights;
}

}  // namespace

RANK_TEST("activation checkpoints under DistributedDataParallel give the same weights", "[checkpointing]", 1, 2, 3) {
  const auto plain = [](auto& ddp) { return FusedAdamW(ddp.module().parameters(), torch::optim::AdamWOptions(0.01)); };
  const auto sharded = [&](const ShardedOptions& options) {
    return
        [options](auto& ddp) { return ShardedOptimizer<FusedAdamW>(ddp, torch::optim::AdamWOptions(0.01), options); };
  };
  const auto check = [&](const DistributedDataParallelOptions& options, const auto& make_optimizer) {
    const auto expected = trained(group, false, options, make_optimizer);
    const auto found = trained(group, true, options, make_optimizer);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      INFO("parameter " << i << " differs by " << (found[i] - expected[i]).abs().max());
      CHECK(torch::equal(found[i], expected[i]));
      ddpkit::testing::check_same_bits_on_all_ranks(group, found[i]);
    }
  };
  const DistributedDataParallelOptions small{.bucket_cap_mb = 0.001, .first_bucket_cap_mb = 0.001};
  check(small, plain);
  auto options = small;
  options.find_unused_parameters = true;
  check(options, plain);
  options = small;
  options.static_graph = true;
  check(options, plain);
  options = small;
  options.gradient_as_bucket_view = true;
  check(options, plain);
  check(small, sharded({}));
  check(small, sharded({.update_in_backward = true}));
  if (group.world_size() > 1) check(small, sharded({.shared_weights = true, .update_in_backward = true}));
}
