#include <ddpkit/train/run.h>
#include <torch/torch.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include <fmt/format.h>

#include <ddpkit/data/distributed_sampler.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/parallel/distributed_data_parallel.h>

#include "support/catch.h"
#include "support/folder.h"
#include "support/ranks.h"

using ddpkit::train::Epoch;
using ddpkit::train::Run;
using ddpkit::train::RunOptions;

namespace {

struct Trained {
  at::Tensor weight;
  std::int64_t step = 0;
  double lr = 0;
  std::vector<double> lrs = {};  // Of the last update of each epoch.
};

// Trains on 24 samples, 2 per update and rank. `loss`: the mean loss that the loop reports.
Trained train(const ddpkit::ProcessGroup& group, RunOptions options, double loss = 0.5) {
  options.epochs = 2;
  options.batch_size = 2;
  options.lr = 1e-2;
  options.amp = false;
  options.progress = "off";
  options.save = !options.save_dir.empty();
  ddpkit::train::Options declared("mine", "A test.");
  ddpkit::train::declare(declared, options);
  torch::manual_seed(3);
  torch::nn::Linear model(20, 10);
  ddpkit::DistributedDataParallel ddp(model, group);
  ddpkit::optim::FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(options.lr));
  ddpkit::DistributedSampler sampler(24, group, {.seed = 1});
  Run run(options, declared, group);
  run.start({.model = *model, .optimizer = optimizer, .wrapper = &ddp, .sampler = &sampler}, {{"data", "test"}});
  std::vector<double> lrs;
  while (run.has_epoch()) {
    Epoch epoch(run, "samples");
    CHECK(epoch.is_new() == (run.step() % (12 / group.world_size()) == 0));
    for (std::int64_t i = 0; epoch.next(); ++i) {
      CHECK(i < epoch.batches());
      optimizer.zero_grad();
      const at::Tensor rows = torch::tensor(epoch.batch(i)).to(torch::kDouble);
      CHECK(rows.numel() == 2);
      ddp(torch::sin(rows.unsqueeze(1) + torch::arange(20)).to(torch::kFloat)).pow(2).mean().backward();
      run.step_optimizer();
      epoch.advance();
    }
    if (!epoch.finish(loss)) break;
    lrs.push_back(epoch.lr());
    run.save();
    epoch.report("a line", {{"loss", loss}}, {{"loss/train", loss}});
    run.write_file("picture.svg", std::to_string(run.epoch()));
  }
  CHECK(run.finish());
  run.print_summary("the result");
  return {model->weight.detach().clone(), run.step(), run.scheduler().learning_rates().front(), lrs};
}

}  // namespace

RANK_TEST("a run that max_steps ends within an epoch resumes there, with the same bits", "[train]", 1, 2, 3) {
  const ddpkit::testing::Folder made;
  const std::string folder = group.all_gather_bytes(made.path().string())[0];
  const std::int64_t updates = 12 / group.world_size();
  const Trained whole = train(group, {});
  CHECK(whole.step == 2 * updates);
  CHECK(whole.lr == 0);  // The cosine ends with the last update.
  const Trained cut = train(group, {.max_steps = updates + 2, .save_dir = folder, .save_steps = 1});
  CHECK(cut.step == updates + 2);
  CHECK(ddpkit::train::read_checkpoint_info(folder + "/checkpoint.pt").step == cut.step);
  CHECK_FALSE(torch::equal(cut.weight, whole.weight));
  const Trained resumed = train(group, {.save_dir = folder, .resume = true});
  CHECK(resumed.step == whole.step);
  CHECK(torch::equal(resumed.weight, whole.weight));
  // The first epoch is of the run that was cut, the second of the resumed run.
  CHECK(ddpkit::testing::read_file(folder + "/metrics.csv") ==
        fmt::format("epoch,step,loss/train,training/lr\n1,{},0.5,{}\n2,{},0.5,{}\n", updates, whole.lrs.at(0),
                    2 * updates, whole.lrs.at(1)));
  CHECK(ddpkit::testing::read_file(folder + "/curves.svg").starts_with("<svg"));
  CHECK(ddpkit::testing::read_file(folder + "/picture.svg") == "2");
  group.barrier();  // Rank 0 removes the folder.
}

RANK_TEST("an epoch whose loss is not finite ends the run on all ranks", "[train]", 1, 2) {
  CHECK_THROWS_WITH(train(group, {}, NAN),
                    ContainsSubstring("the loss became nan in epoch 1") && ContainsSubstring("lower --lr (0.01)"));
}

RANK_TEST("an evaluation scope has the buffers of rank 0 and restores the mode of the model", "[train]", 2, 3) {
  torch::nn::BatchNorm1d norm(4);
  norm->running_mean.fill_(1 + group.rank());
  {
    const ddpkit::train::EvaluationScope scope(*norm, group);
    CHECK(torch::equal(norm->running_mean, torch::ones({4})));
    CHECK_FALSE(norm->is_training());
    CHECK_FALSE(torch::GradMode::is_enabled());
  }
  CHECK(norm->is_training());
  CHECK(torch::GradMode::is_enabled());
}
