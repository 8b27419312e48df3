#include <torch/torch.h>

#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/grad_scaler.h>
#include <ddpkit/optim/sharded_optimizer.h>
#include <ddpkit/parallel/distributed_data_parallel.h>
#include <ddpkit/parallel/join.h>

#include "ranks/comparisons.h"
#include "ranks/two_layers.h"
#include "support/catch.h"
#include "support/ranks.h"

using ddpkit::DistributedDataParallel;
using ddpkit::InvalidArgument;
using ddpkit::optim::FusedAdamW;
using ddpkit::optim::ShardedOptimizer;
using ddpkit::optim::ShardedOptions;
using ddpkit::testing::check_same_bits_on_all_ranks;
namespace two_layers = ddpkit::testing::two_layers;

namespace {

/// Rank 0 has the fewest steps.
int steps_of(int rank) { return 2 + 3 * rank; }

double rate(int step) { return 0.1 / (1 + step); }

/// The calls after a backward, apart from step().
struct Way {
  bool clips = false;
  bool skips = false;  ///< Skips step() after the fourth backward.
  ShardedOptions options = {};
};

}  // namespace

RANK_TEST("ranks that run out of inputs follow schedules, clipping and skipped steps of a sharded optimizer",
          "[optim][sharded][join]", 2, 3) {
  const std::vector<Way> ways{{.clips = true},
                              {.skips = true},
                              {.clips = true, .skips = true, .options = {.shared_weights = true}},
                              {.options = {.update_in_backward = true}},
                              {.options = {.shared_weights = true, .update_in_backward = true}}};
  const int ranks = group.world_size();
  const auto options = torch::optim::AdamWOptions(rate(0)).weight_decay(0.1);
  for (const Way& way : ways) {
    INFO("clips " << way.clips << ", skips " << way.skips << ", shared " << way.options.shared_weights
                  << ", in backward " << way.options.update_in_backward);
    auto model = two_layers::make_model();
    auto reference = two_layers::make_model();
    torch::optim::AdamW alone(reference->parameters(), options);
    DistributedDataParallel ddp(model, group);
    ShardedOptimizer<FusedAdamW> optimizer(ddp, options, way.options);
    for (const int first : {0, 100}) {  // Two joins in sequence.
      std::vector<double> norms;
      for (int step = 0; step < steps_of(ranks - 1); ++step) {
        alone.zero_grad();
        for (int r = 0; r < ranks; ++r) {
          if (step < steps_of(r))
            (two_layers::loss_of(reference->forward(two_layers::input(first + step, r))) / ranks).backward();
        }
        if (way.clips) norms.push_back(torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.1));
        alone.param_groups()[0].options().set_lr(rate(step));
        if (!way.skips || step != 3) alone.step();
      }
      ddpkit::join({ddp, optimizer}, [&] {
        for (int step = 0; step < steps_of(group.rank()); ++step) {
          optimizer.param_groups()[0].options().set_lr(rate(step));
          optimizer.zero_grad();
          two_layers::loss_of(ddp(two_layers::input(first + step, group.rank()))).backward();
          if (way.clips)
            CHECK(optimizer.clip_grad_norm(0.1) == Approx(norms[static_cast<std::size_t>(step)]).epsilon(1e-9));
          if (!way.skips || step != 3) optimizer.step();
        }
      });
      CHECK(optimizer.param_groups()[0].options().get_lr() == rate(steps_of(ranks - 1) - 1));
      for (std::size_t i = 0; i < model->parameters().size(); ++i)
        CHECK(at::allclose(model->parameters()[i], reference->parameters()[i], 0, 1e-6));
      check_same_bits_on_all_ranks(group, *model);
    }
  }
}

RANK_TEST("join refuses a sharded optimizer that it does not know, and a gradient scaler", "[optim][sharded][join]",
          2) {
  for (const bool scaled : {false, true}) {
    auto model = two_layers::make_model();
    const auto own = ddpkit::testing::another_group(group, fmt::format("scaled {}", scaled));
    DistributedDataParallel ddp(model, own);
    ShardedOptimizer<FusedAdamW> optimizer(ddp, torch::optim::AdamWOptions(0.1));
    ddpkit::optim::GradScaler scaler(own);
    const auto loop = [&] {
      optimizer.zero_grad();
      scaler.scale(two_layers::loss_of(ddp(two_layers::input(0, group.rank())))).backward();
      if (scaled)
        scaler.step(optimizer);
      else
        optimizer.step();
    };
    if (scaled)
      CHECK_THROWS_WITH(ddpkit::join({ddp, optimizer}, loop), ContainsSubstring("GradScaler"));
    else
      CHECK_THROWS_WITH(ddpkit::join(ddp, loop), ContainsSubstring("join({ddp, optimizer}"));
  }
}
