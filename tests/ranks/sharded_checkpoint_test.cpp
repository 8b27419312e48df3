#include <torch/torch.h>

#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/sharded_optimizer.h>
#include <ddpkit/parallel/distributed_data_parallel.h>
#include <ddpkit/train/checkpoint.h>

#include "support/catch.h"
#include "support/folder.h"
#include "support/ranks.h"

using ddpkit::DistributedDataParallel;
using ddpkit::optim::FusedAdamW;
using ddpkit::optim::ShardedOptimizer;

namespace {

torch::nn::Linear make_model() {
  torch::manual_seed(3);
  torch::nn::Linear model(50, 40);
  model->to(torch::kDouble);
  return model;
}

torch::Tensor input(std::int64_t step) {
  torch::manual_seed(static_cast<std::uint64_t>(step));
  return torch::randn({4, 50}, torch::kDouble);
}

template <class Forward, class Optimizer>
void train(Forward& forward, Optimizer& optimizer, std::int64_t from, std::int64_t to) {
  for (std::int64_t step = from; step < to; ++step) {
    optimizer.zero_grad();
    forward(input(step)).pow(2).mean().backward();
    optimizer.step();
  }
}

}  // namespace

RANK_TEST("a run with a sharded optimizer resumes from its checkpoint, also without sharding", "[optim][sharded]", 2,
          3) {
  const ddpkit::testing::Folder made;
  const auto folders = group.all_gather_bytes(made.path().string());
  const std::filesystem::path path = std::filesystem::path(folders[0]) / "checkpoint.pt";
  const torch::optim::AdamWOptions options(1e-2);
  for (const bool in_backward : {false, true}) {
    auto whole = make_model();
    {
      DistributedDataParallel ddp(whole, group);
      ShardedOptimizer<FusedAdamW> optimizer(ddp, options, {.update_in_backward = in_backward});
      train(ddp, optimizer, 0, 5);
      ddpkit::train::save_checkpoint(path, *whole, optimizer, {.epoch = 1, .step = 5}, group);
      train(ddp, optimizer, 5, 10);
    }
    auto model = make_model();
    DistributedDataParallel ddp(model, group);
    ShardedOptimizer<FusedAdamW> optimizer(ddp, options, {.update_in_backward = in_backward});
    train(ddp, optimizer, 20, 22);  // The load below discards these steps.
    CHECK(ddpkit::train::load_checkpoint(path, *model, optimizer, group).step == 5);
    train(ddp, optimizer, 5, 10);
    CHECK(torch::equal(model->weight, whole->weight));

    auto alone = make_model();
    FusedAdamW plain(alone->parameters(), options);
    ddpkit::train::read_checkpoint(path, *alone, plain);
    train(alone, plain, 5, 10);
    CHECK(torch::allclose(alone->weight, whole->weight, 0, 1e-10));
    group.barrier();
  }
}

RANK_TEST("a checkpoint of parameters that differ between ranks is refused", "[train]", 2, 3) {
  const ddpkit::testing::Folder made;
  const auto folders = group.all_gather_bytes(made.path().string());
  const std::filesystem::path path = std::filesystem::path(folders[0]) / "checkpoint.pt";
  auto model = make_model();
  DistributedDataParallel ddp(model, group);
  FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  train(ddp, optimizer, 0, 2);
  ddpkit::train::Checkpoint checkpoint(path, group);
  checkpoint.save(*model, optimizer, {.step = 2});
  checkpoint.wait();
  train(ddp, optimizer, 2, 3);
  if (group.rank() == 1) {
    const torch::NoGradGuard no_grad;
    model->bias[3] += 1e-12;
  }
  CHECK_THROWS_WITH(checkpoint.save(*model, optimizer, {.step = 3}),
                    ContainsSubstring("rank 0 has parameter bias") && ContainsSubstring("rank 1 has parameter bias"));
  CHECK_THROWS_WITH(ddpkit::train::save_checkpoint(path, *model, optimizer, {.step = 3}, group),
                    ContainsSubstring("parameter bias"));
  CHECK(ddpkit::train::read_checkpoint_info(path).step == 2);
  group.barrier();  // Waits before the folder is removed.

  ddpkit::train::Checkpoint unchecked(path, group, {.check_parameters = false});
  unchecked.save(*model, optimizer, {.step = 3});
  unchecked.wait();
  CHECK(ddpkit::train::read_checkpoint_info(path).step == 3);
  group.barrier();
}
