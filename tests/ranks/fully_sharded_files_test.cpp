// Checkpoints of fully sharded runs: whole ones, and sharded ones with a file per rank and an index.
#include <torch/torch.h>

#include <fstream>

#include <ddpkit/error.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/fused_sgd.h>
#include <ddpkit/optim/sharded_optimizer.h>
#include <ddpkit/parallel/fully_sharded_data_parallel.h>
#include <ddpkit/train/checkpoint.h>

#include "ranks/comparisons.h"
#include "ranks/fully_sharded_models.h"
#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/folder.h"
#include "support/ranks.h"

namespace fs = std::filesystem;
using ddpkit::DistributedDataParallel, ddpkit::FullyShardedDataParallel, ddpkit::InvalidArgument, ddpkit::ProcessGroup;
using ddpkit::optim::FusedAdamW, ddpkit::optim::FusedSGD, ddpkit::optim::ShardedOptimizer;
using ddpkit::testing::backward_alone, ddpkit::testing::largest_difference, ddpkit::testing::Cnn,
    ddpkit::testing::flat_parameters, ddpkit::testing::LossModel, ddpkit::testing::maker;
using ddpkit::testing::names_in, ddpkit::testing::Transformer;
using ddpkit::train::Checkpoint, ddpkit::train::load_checkpoint, ddpkit::train::read_checkpoint;

namespace {

const torch::optim::AdamWOptions kAmsgrad = torch::optim::AdamWOptions(1e-2).amsgrad(true);

template <class M = Cnn>
struct Sharded {
  explicit Sharded(const ProcessGroup& group, const std::function<void(M&)>& change = {})
      : Sharded(group, kAmsgrad, change) {}
  Sharded(const ProcessGroup& group, const torch::optim::AdamWOptions& adamw,
          const std::function<void(M&)>& change = {}, int replicas = 1)
      : model(maker<M>(at::kDouble, change)()),
        fsdp(model, group, {.min_unit_mb = 0, .replicas = replicas}),
        optimizer(fsdp, adamw) {}
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

/// A folder of all ranks; rank 0 removes it.
struct SharedFolder {
  explicit SharedFolder(const ProcessGroup& group) : path(group.all_gather_bytes(made.path().string())[0]) {}
  ddpkit::testing::Folder made;
  fs::path path;
};

/// The first `count` ranks.
std::optional<ProcessGroup> first_ranks(const ProcessGroup& group, int count) {
  std::vector<int> ranks;
  for (int rank = 0; rank < count; ++rank) ranks.push_back(rank);
  return group.split(ranks);
}

std::size_t shards_in(const fs::path& folder) { return names_in(folder / "a.shards").size(); }

/// A checkpoint of `before` ranks is loaded on 1 to 4 ranks, sharded, by ZeRO stage 2 and whole. All have the same
/// weights and the same next step.
template <class M>
void check_numbers_of_ranks(const ProcessGroup& group, const SharedFolder& folder, int before) {
  const fs::path path = folder.path / "a.pt";
  if (const auto some = first_ranks(group, before)) {
    Sharded<M> job(*some);
    job.train(0, 3);
    Checkpoint(path, *some, {.sharded = true}).save(*job.model, job.optimizer, {.epoch = 1, .step = 3});
    job.train(3, 4);
    const at::Tensor weights = job.weights();
    if (some->rank() == 0) torch::save(weights, (folder.path / "expected").string());
  }
  group.barrier();
  at::Tensor expected;
  torch::load(expected, (folder.path / "expected").string());
  CHECK(shards_in(folder.path) == static_cast<std::size_t>(before));

  // The step that `before` ranks have made, by any number of ranks: each has the batch of rank 0 to `before` - 1.
  const auto step_as_before = [&](LossModel& model, auto&& forward, torch::optim::Optimizer& optimizer) {
    for (int rank = 0; rank < before; ++rank) (forward(model.input(3, rank, at::kDouble)) / before).backward();
    optimizer.step();
  };
  for (int now = 1; now <= group.world_size(); ++now) {
    const auto some = first_ranks(group, now);
    if (some) {
      Sharded<M> job(*some);
      job.train(7, 9);  // The load below discards these steps.
      const auto info = load_checkpoint(path, *job.model, job.optimizer, *some);
      CHECK(info.step == 3);
      CHECK(info.ranks == before);
      // Batch norm uses the statistics of a batch, so several backwards add up.
      job.optimizer.zero_grad();
      step_as_before(*job.model, job.fsdp, job.optimizer);
      CHECK(ddpkit::testing::largest_difference(job.weights(), expected) < 1e-9);

      const auto model = maker<M>(at::kDouble)();
      DistributedDataParallel ddp(model, *some);
      ShardedOptimizer<FusedAdamW> zero2(ddp, kAmsgrad);
      CHECK(load_checkpoint(path, *model, zero2, *some).epoch == 1);
      step_as_before(*model, ddp, zero2);
      CHECK(ddpkit::testing::largest_difference(flat_parameters(*model), expected) < 1e-9);
    }
    group.barrier();
  }
  const auto alone = maker<M>(at::kDouble)();
  torch::optim::AdamW plain(alone->parameters(), kAmsgrad);
  CHECK(read_checkpoint(path, *alone, plain).step == 3);
  step_as_before(
      *alone, [&](const at::Tensor& x) { return alone->forward(x); }, plain);
  CHECK(ddpkit::testing::largest_difference(flat_parameters(*alone), expected) < 1e-9);
  group.barrier();
}

}  // namespace

RANK_TEST("one replica of a fully sharded model writes its shards", "[fsdp][checkpoint]", 4) {
  const SharedFolder folder(group);
  const fs::path path = folder.path / "a.pt";
  Sharded<Cnn> replicas(group, kAmsgrad, {}, 2);
  replicas.train(0, 3);
  Checkpoint(path, group, {.sharded = true}).save(*replicas.model, replicas.optimizer, {.epoch = 1, .step = 3});
  group.barrier();
  CHECK(shards_in(folder.path) == 2);
  Sharded<Cnn> same(group, kAmsgrad, {}, 2), other(group, kAmsgrad);
  for (auto* job : {&same, &other}) {
    job->train(5, 6);  // The load discards this step.
    CHECK(load_checkpoint(path, *job->model, job->optimizer, group).step == 3);
    job->train(3, 4);
  }
  replicas.train(3, 4);
  CHECK(largest_difference(same.weights(), replicas.weights()) < 1e-12);
  CHECK(largest_difference(other.weights(), replicas.weights()) < 1e-9);
}

RANK_TEST("a fully sharded run resumes from its checkpoint, also without sharding", "[fsdp]", 1, 2, 3) {
  const torch::optim::AdamWOptions adamw(1e-2);
  const SharedFolder folder(group);
  const fs::path path = folder.path / "a.pt";
  Sharded first(group, adamw);
  first.train(0, 5);
  CHECK_THROWS(ddpkit::train::save_checkpoint(path, *first.model, first.optimizer, {.step = 5}, group));
  {
    const auto whole = first.fsdp.whole();
    ddpkit::train::save_checkpoint(path, *first.model, first.optimizer, {.step = 5}, group);
  }
  first.train(5, 10);

  Sharded second(group, adamw);
  second.train(20, 22);  // The load below discards these steps.
  {
    const auto whole = second.fsdp.whole();
    CHECK(load_checkpoint(path, *second.model, second.optimizer, group).step == 5);
  }
  second.train(5, 10);
  CHECK(torch::equal(second.weights(), first.weights()));

  const auto alone = maker<Cnn>(at::kDouble)();
  FusedAdamW plain(alone->parameters(), adamw);
  read_checkpoint(path, *alone, plain);
  for (int step = 5; step < 10; ++step) {
    plain.zero_grad();
    backward_alone(*alone, step, group.world_size(), group.rank(), at::kDouble);
    plain.step();
  }
  CHECK(largest_difference(flat_parameters(*alone), first.weights()) < 1e-6);
  group.barrier();  // Waits before the folder is removed.
}

RANK_TEST("a sharded checkpoint is loaded on any number of ranks, and without sharding", "[fsdp][checkpoint]", 4) {
  const SharedFolder folder(group);
  for (const int before : {1, 2, 3, 4}) {
    CAPTURE(before);
    check_numbers_of_ranks<Cnn>(group, folder, before);
  }
  check_numbers_of_ranks<Transformer>(group, folder, 3);
}

RANK_TEST("a sharded checkpoint resumes a run bit by bit", "[fsdp][checkpoint]", 1, 2, 3) {
  const SharedFolder folder(group);
  Sharded first(group);
  Checkpoint checkpoint(folder.path / "a.pt", group, {.sharded = true});
  first.train(0, 3);
  checkpoint.save(*first.model, first.optimizer, {.step = 3});
  first.train(3, 6);
  const at::Tensor drawn = torch::rand({3});
  Sharded second(group);
  checkpoint.load(*second.model, second.optimizer);
  second.train(3, 6);
  CHECK(torch::rand({3}).equal(drawn));
  CHECK(torch::equal(second.weights(), first.weights()));
  for (std::size_t i = 0; i < first.model->buffers().size(); ++i)
    CHECK(torch::equal(second.model->buffers()[i], first.model->buffers()[i]));
  {
    const auto whole = second.fsdp.whole();  // Loads whole parameters.
    checkpoint.load(*second.model, second.optimizer);
    CHECK_THROWS_WITH(checkpoint.save(*second.model, second.optimizer, {}), ContainsSubstring("end the scope"));
  }
  second.train(3, 6);
  CHECK(torch::equal(second.weights(), first.weights()));
  group.barrier();
}

RANK_TEST("a whole checkpoint is loaded into a fully sharded model without a scope", "[fsdp][checkpoint]", 2) {
  const SharedFolder folder(group);
  Sharded first(group);
  first.train(0, 3);
  {
    const auto whole = first.fsdp.whole();
    ddpkit::train::save_checkpoint(folder.path / "a.pt", *first.model, first.optimizer, {.step = 3}, group);
  }
  first.train(3, 5);
  Sharded second(group);
  second.train(7, 8);
  CHECK(load_checkpoint(folder.path / "a.pt", *second.model, second.optimizer, group).step == 3);
  second.train(3, 5);
  CHECK(torch::equal(second.weights(), first.weights()));
  group.barrier();
}

RANK_TEST("frozen parameters and learning rates are in a sharded checkpoint", "[fsdp][checkpoint]", 2, 3) {
  const SharedFolder folder(group);
  const auto freeze = [](Transformer& model) {
    for (const at::Tensor& parameter : model.gpt->block(1)->parameters()) parameter.set_requires_grad(false);
  };
  Sharded<Transformer> first(group, freeze);
  {
    const auto whole = first.fsdp.whole();
    const torch::NoGradGuard no_grad;
    std::dynamic_pointer_cast<Transformer>(first.model)->gpt->block(1)->up->weight.fill_(0.5);
  }
  first.train(0, 2);
  first.optimizer.param_groups()[0].options().set_lr(0.25);
  Checkpoint checkpoint(folder.path / "a.pt", group, {.sharded = true});
  checkpoint.save(*first.model, first.optimizer, {});
  Sharded<Transformer> second(group, freeze);
  checkpoint.load(*second.model, second.optimizer);
  CHECK(second.optimizer.param_groups()[0].options().get_lr() == 0.25);
  CHECK(torch::equal(second.weights(), first.weights()));
  const auto whole = second.fsdp.whole();
  CHECK(std::dynamic_pointer_cast<Transformer>(second.model)->gpt->block(1)->up->weight.eq(0.5).all().item<bool>());
  group.barrier();
}

RANK_TEST("a sharded checkpoint that cannot be written leaves the one before", "[fsdp][checkpoint]", 2, 3) {
  const SharedFolder folder(group);
  const fs::path path = folder.path / "a.pt";
  Sharded job(group);
  job.train(0, 2);
  Checkpoint checkpoint(path, group, {.sharded = true});
  checkpoint.save(*job.model, job.optimizer, {.step = 2});
  const at::Tensor weights = job.weights();
  const auto check_old = [&] {
    Sharded other(group);
    CHECK(load_checkpoint(path, *other.model, other.optimizer, group).step == 2);
    CHECK(torch::equal(other.weights(), weights));
    group.barrier();
  };
  job.train(2, 4);
  // The index cannot be written: all shards exist, but none has its name in an index. The step is the same.
  if (group.rank() == 0) fs::create_directory(folder.path / "a.pt.tmp");
  group.barrier();
  CHECK_THROWS_AS(checkpoint.save(*job.model, job.optimizer, {.step = 2}), ddpkit::Error);
  CHECK(shards_in(folder.path) == 2 * static_cast<std::size_t>(group.world_size()));
  check_old();
  if (group.rank() == 0) fs::remove(folder.path / "a.pt.tmp");
  group.barrier();
  // Files of a run that was killed while it wrote.
  if (group.rank() == 0) std::ofstream(folder.path / "a.shards" / "4-00000000-1.pt.tmp") << "half";
  group.barrier();
  check_old();
  checkpoint.save(*job.model, job.optimizer, {.step = 4});
  CHECK(shards_in(folder.path) == static_cast<std::size_t>(group.world_size()));
  Sharded other(group);
  CHECK(load_checkpoint(path, *other.model, other.optimizer, group).step == 4);
  CHECK(torch::equal(other.weights(), job.weights()));
  group.barrier();
}

RANK_TEST("the shards of the last checkpoints and of the best one stay, and replace damaged ones", "[fsdp][checkpoint]",
          2) {
  const SharedFolder folder(group);
  const fs::path path = folder.path / "a.pt";
  Sharded job(group);
  Checkpoint checkpoint(path, group, {.keep = 2, .sharded = true});
  std::vector<at::Tensor> weights;
  for (int step = 1; step <= 4; ++step) {
    job.train(step, step + 1);
    weights.push_back(job.weights());
    checkpoint.save(*job.model, job.optimizer, {.step = step}, {}, step == 1);
  }
  CHECK(names_in(folder.path) == std::vector<std::string>{"a-3.pt", "a-4.pt", "a.pt", "a.shards", "best.pt"});
  CHECK(shards_in(folder.path) == 6);
  Sharded other(group);
  CHECK(load_checkpoint(folder.path / "best.pt", *other.model, other.optimizer, group).step == 1);
  CHECK(torch::equal(other.weights(), weights[0]));
  if (group.rank() == 0) {
    for (const std::string& name : names_in(folder.path / "a.shards"))
      if (name.starts_with("4-") && name.ends_with("-1.pt")) fs::resize_file(folder.path / "a.shards" / name, 2000);
  }
  group.barrier();
  CHECK_THROWS_AS(load_checkpoint(path, *other.model, other.optimizer, group), InvalidArgument);
  CHECK(torch::equal(other.weights(), weights[0]));
  ddpkit::train::CheckpointInfo info;
  const std::string printed =
      ddpkit::testing::stderr_of([&] { info = checkpoint.load(*other.model, other.optimizer); });
  CHECK(info.step == 3);
  CHECK(torch::equal(other.weights(), weights[2]));
  if (group.rank() == 0) CHECK_THAT(printed, ContainsSubstring("resuming from") && ContainsSubstring("a-3.pt"));
  group.barrier();
}

RANK_TEST("a sharded checkpoint of another model or optimizer is refused", "[fsdp][checkpoint]", 2) {
  const SharedFolder folder(group);
  const fs::path path = folder.path / "a.pt";
  Sharded job(group);
  job.train(0, 1);
  Checkpoint checkpoint(path, group, {.sharded = true});
  checkpoint.save(*job.model, job.optimizer, {});
  Sharded<Transformer> other(group);
  CHECK_THROWS_WITH(load_checkpoint(path, *other.model, other.optimizer, group),
                    ContainsSubstring("is of another model"));
  ShardedOptimizer<FusedSGD> sgd(job.fsdp, torch::optim::SGDOptions(0.1));
  CHECK_THROWS_WITH(load_checkpoint(path, *job.model, sgd, group), ContainsSubstring("was made with"));
  const auto model = maker<Cnn>(at::kDouble)();
  DistributedDataParallel ddp(model, group);
  FusedAdamW whole(model->parameters(), kAmsgrad);
  CHECK_THROWS_WITH(checkpoint.save(*model, whole, {}), ContainsSubstring("a sharded checkpoint needs"));
  if (group.rank() == 0) fs::remove_all(folder.path / "a.shards");
  group.barrier();
  CHECK_THROWS_AS(load_checkpoint(path, *job.model, job.optimizer, group), InvalidArgument);
  group.barrier();
}
