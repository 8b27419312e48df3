#include <torch/torch.h>

#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/sharded_optimizer.h>
#include <ddpkit/parallel/fully_sharded_data_parallel.h>
#include <ddpkit/train/checkpoint.h>

#include "ranks/comparisons.h"
#include "ranks/fully_sharded_models.h"
#include "support/catch.h"
#include "support/folder.h"
#include "support/ranks.h"

using ddpkit::FullyShardedDataParallel;
using ddpkit::optim::FusedAdamW, ddpkit::optim::ShardedOptimizer;
using ddpkit::testing::backward_alone, ddpkit::testing::Cnn, ddpkit::testing::flat_parameters;
using ddpkit::testing::largest_difference, ddpkit::testing::LossModel, ddpkit::testing::maker;

namespace {

const torch::optim::AdamWOptions kOptions(1e-2);

struct Job {
  explicit Job(ddpkit::ProcessGroup& group)
      : model(maker<Cnn>(at::kDouble)()), fsdp(model, group, {.min_unit_mb = 0}), optimizer(fsdp, kOptions) {}
  void train(int from, int to) {
    for (int step = from; step < to; ++step) {
      optimizer.zero_grad();
      fsdp(model->input(step, fsdp.group().rank(), at::kDouble)).backward();
      optimizer.step();
    }
  }
  at::Tensor weights() {
    const auto whole = fsdp.whole();
    return flat_parameters(*model);
  }
  std::shared_ptr<LossModel> model;
  FullyShardedDataParallel<LossModel> fsdp;
  ShardedOptimizer<FusedAdamW> optimizer;
};

}  // namespace

RANK_TEST("a fully sharded run resumes from its checkpoint, also without sharding", "[fsdp]", 1, 2, 3) {
  const ddpkit::testing::Folder made;
  const std::filesystem::path path = std::filesystem::path(group.all_gather_bytes(made.path().string())[0]) / "a.pt";
  Job first(group);
  first.train(0, 5);
  CHECK_THROWS(ddpkit::train::save_checkpoint(path, *first.model, first.optimizer, {.step = 5}, group));
  {
    const auto whole = first.fsdp.whole();
    ddpkit::train::save_checkpoint(path, *first.model, first.optimizer, {.step = 5}, group);
  }
  first.train(5, 10);

  Job second(group);
  second.train(20, 22);  // The load below discards these steps.
  {
    const auto whole = second.fsdp.whole();
    CHECK(ddpkit::train::load_checkpoint(path, *second.model, second.optimizer, group).step == 5);
  }
  second.train(5, 10);
  CHECK(torch::equal(second.weights(), first.weights()));

  const auto alone = maker<Cnn>(at::kDouble)();
  FusedAdamW plain(alone->parameters(), kOptions);
  ddpkit::train::read_checkpoint(path, *alone, plain);
  for (int step = 5; step < 10; ++step) {
    plain.zero_grad();
    backward_alone(*alone, step, group.world_size(), group.rank(), at::kDouble);
    plain.step();
  }
  CHECK(largest_difference(flat_parameters(*alone), first.weights()) < 1e-6);
  group.barrier();  // Waits before the folder is removed.
}
