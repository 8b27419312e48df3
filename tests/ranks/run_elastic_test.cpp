// Run and Epoch with RunOptions::elastic: the loss of a rank within a training.
#include <ddpkit/train/run.h>
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/data/distributed_sampler.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/optim/sharded_optimizer.h>
#include <ddpkit/parallel/distributed_data_parallel.h>
#include <ddpkit/train/metrics.h>

#include "ranks/elastic_loss.h"
#include "ranks/elastic_run.h"
#include "support/catch.h"
#include "support/folder.h"
#include "support/ranks.h"

using ddpkit::ProcessGroup;
using ddpkit::testing::die;
using ddpkit::testing::elastic_group;
using ddpkit::testing::elastic_options;
using ddpkit::testing::Folder;
using ddpkit::testing::on_ranks;
using ddpkit::testing::read_file;
using ddpkit::train::Epoch;
using ddpkit::train::Run;
using ddpkit::train::RunOptions;

namespace {

constexpr int kSamples = 70;
constexpr int kEpochs = 3;
constexpr int kUpdatesPerEpoch = 6;  // Of 3 ranks.

/// The moment at which a rank of a run ends by SIGKILL.
struct Death {
  int rank = 1;
  std::int64_t step = 0;  ///< Updates before.
  std::string at = {};    ///< Within the next update: "forward", "gradient"; empty: before it. Or after the update
                          ///< before: "evaluation", "save", "write" (on rank 0), "report".
};

/// Trains like the trainers of this project. Writes each rank's weights, statistics and random numbers to
/// `folder`/RANK, and the lost updates to `folder`/lost-RANK. RANK is the number at the start.
void train(const Folder& folder, const Death& death) {
  const ProcessGroup group = elastic_group();
  const int first_rank = group.rank();
  const auto dies = [&](std::int64_t step, const std::string& at) {
    if (death.rank == first_rank && death.step == step && death.at == at) die();
  };
  RunOptions options = elastic_options(kEpochs, folder / "run", 2);
  ddpkit::train::Options declared("mine", "A test.");
  ddpkit::train::declare(declared, options);
  const torch::Tensor inputs = torch::randn({kSamples, 6}, at::make_generator<at::CPUGeneratorImpl>(3));
  const torch::Tensor targets = torch::arange(kSamples).remainder(3);
  Run run(options, declared, group);
  auto model = run.make_model([] {
    return torch::nn::Sequential(torch::nn::Linear(6, 64), torch::nn::BatchNorm1d(64), torch::nn::ReLU(),
                                 torch::nn::Dropout(0.3), torch::nn::Linear(64, 3));
  });
  ddpkit::DistributedDataParallel ddp(model, group);
  model->parameters().back().register_hook([&](const torch::Tensor&) { dies(run.step(), "gradient"); });
  ddpkit::optim::FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(options.lr));
  ddpkit::DistributedSampler sampler(kSamples, group, {.seed = 1});
  ddpkit::train::ClassificationMetrics metrics(3);
  run.start({.model = *model,
             .optimizer = optimizer,
             .wrapper = &ddp,
             .sampler = &sampler,
             .state = {{.name = "gathered",
                        .save = [&](auto&) { dies(run.step(), "save"); },
                        .load = [](auto&) {},
                        .of_each_rank = true},
                       {.name = "written", .save = [&](auto&) { dies(run.step(), "write"); }, .load = [](auto&) {}},
                       ddpkit::train::checkpoint_part("metrics", metrics, /*of_each_rank=*/true)}},
            {{"data", "test"}});
  std::ofstream lost(folder / ("lost-" + std::to_string(first_rank)));
  std::uint64_t generation = 0;
  while (run.has_epoch()) {
    Epoch epoch(run, "samples");
    if (epoch.is_new()) metrics = ddpkit::train::ClassificationMetrics(3);
    ddpkit::train::ClassificationResult trained, tested;
    std::map<std::int64_t, int> uses;
    epoch.retry([&] {
      if (std::exchange(generation, group.generation()) != group.generation()) lost << run.step() << '\n' << std::flush;
      model->train();
      for (std::int64_t i = 0; epoch.next(); ++i) {
        dies(run.step(), "");
        const torch::Tensor chosen = torch::tensor(epoch.batch(i));
        const torch::Tensor all = group.all_gather(chosen);
        optimizer.zero_grad();
        model->train(chosen.numel() > 1);  // Batch norm needs two samples.
        const torch::Tensor logits = ddp(inputs.index({chosen}));
        dies(run.step(), "forward");
        const torch::Tensor loss = torch::cross_entropy_loss(logits, targets.index({chosen}));
        run.scaler().scale(loss).backward();
        run.step_optimizer();
        metrics.add(logits.detach(), targets.index({chosen}), loss);
        for (std::int64_t k = 0; k < all.numel(); ++k) ++uses[all.view({-1})[k].item<std::int64_t>()];
        epoch.advance();
      }
      trained = metrics.reduce(group);
    });
    int repeated = 0;
    for (const auto& [sample, times] : uses) repeated += times - 1;
    CHECK(std::ssize(uses) == kSamples);
    CHECK(repeated < group.world_size());  // Padding at the end of the epoch.
    REQUIRE(epoch.finish(trained.loss));
    run.retry([&] {
      const ddpkit::train::EvaluationScope scope(*model, group);
      ddpkit::train::ClassificationMetrics test(3);
      dies(run.step(), "evaluation");
      const auto share = ddpkit::train::evaluation_share(kSamples, group.rank(), group.world_size());
      const torch::Tensor own = torch::arange(share.begin, share.end);
      const torch::Tensor logits = model->forward(inputs.index({own}));
      test.add(logits, targets.index({own}), torch::cross_entropy_loss(logits, targets.index({own})));
      tested = test.reduce(group);
    });
    CHECK(tested.samples == kSamples);
    run.save();
    dies(run.step(), "report");
    epoch.report(trained, tested, "test", "Test", {"a", "b", "c"}, "end", {});
  }
  CHECK(run.finish());
  run.print_summary("the result");
  std::ofstream file(folder / std::to_string(first_rank), std::ios::binary);
  std::vector<torch::Tensor> values = model->parameters();
  for (const torch::Tensor& buffer : model->buffers()) values.push_back(buffer);
  values.push_back(torch::randn({4}));  // The state of the generator.
  values.push_back(torch::tensor({run.scheduler().learning_rates().front()}, torch::kDouble));
  ddpkit::testing::write_bytes(file, values);
  if (death.rank == first_rank) die();
}

/// Returns the rows of metrics.csv. [row][field]
std::vector<std::vector<std::string>> records(const Folder& folder) {
  std::vector<std::vector<std::string>> rows;
  std::istringstream lines(read_file(folder / "run/metrics.csv"));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    auto& row = rows.emplace_back();
    for (std::string field; std::getline(fields, field, ',');) row.push_back(field);
  }
  return rows;
}

/// Runs a training that loses a rank, and the training in which that rank leaves before the same update.
void compare(const std::string& name, const Death& death) {
  constexpr int kRanks = 3;
  CAPTURE(death.rank, death.step, death.at);
  const Folder disturbed, calm;
  on_ranks(name, kRanks, [&](ProcessGroup&) { train(disturbed, death); }, {.doomed = {death.rank}});
  const int survivor = death.rank == 0 ? 1 : 0;
  const std::string lost = read_file(disturbed / ("lost-" + std::to_string(survivor)));
  CHECK(lost == read_file(disturbed / ("lost-" + std::to_string(3 - survivor - death.rank))));
  const std::int64_t step = std::stoll(lost);
  CHECK(step == death.step);
  // Otherwise the rank ends before the next epoch's random numbers, and cannot leave there.
  const bool is_within_epoch = step % kUpdatesPerEpoch != 0;
  if (is_within_epoch) {
    const Death leaves{.rank = death.rank, .step = step};
    on_ranks(name, kRanks, [&](ProcessGroup&) { train(calm, leaves); }, {.doomed = {death.rank}});
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == death.rank) continue;
      const std::string result = read_file(calm / std::to_string(rank));
      CHECK(!result.empty());
      CHECK(result == read_file(disturbed / std::to_string(rank)));
    }
  }
  // Each epoch has one row, also if another rank reports it.
  const auto rows = records(disturbed);
  REQUIRE(rows.size() == 1 + kEpochs);
  for (std::size_t epoch = 1; epoch < rows.size(); ++epoch) CHECK(rows[epoch][0] == std::to_string(epoch));
  const auto info = ddpkit::train::read_checkpoint_info(disturbed / "run/checkpoint.pt");
  CHECK(info.epoch == kEpochs);
  CHECK(info.ranks == 2);
  CHECK(nlohmann::json::parse(info.config)["world_size"] == 2);
}

}  // namespace

TEST_CASE("a run that loses a rank within an update ends as one that the rank leaves before it",
          "[ranks][train][elastic]") {
  const char* name = "a run that loses a rank within an update ends as one that the rank leaves before it";
  for (int rank = 0; rank < 3; ++rank) {
    compare(name, {.rank = rank, .step = 1 + rank, .at = "forward"});
    compare(name, {.rank = rank, .step = kUpdatesPerEpoch + 1 + rank, .at = "gradient"});
  }
}

TEST_CASE("a run continues if a rank is lost in an evaluation or a save or a report", "[ranks][train][elastic]") {
  const char* name = "a run continues if a rank is lost in an evaluation or a save or a report";
  for (const int rank : {0, 1}) {
    for (const char* at : {"evaluation", "save", "report"})
      compare(name, {.rank = rank, .step = kUpdatesPerEpoch, .at = at});
    compare(name, {.rank = rank, .step = kUpdatesPerEpoch + 2, .at = "save"});
  }
  compare(name, {.rank = 0, .step = kUpdatesPerEpoch, .at = "write"});
  compare(name, {.rank = 0, .step = kUpdatesPerEpoch + 2, .at = "write"});
}

TEST_CASE("an elastic run refuses what cannot continue without a rank", "[ranks][train][elastic]") {
  on_ranks("an elastic run refuses what cannot continue without a rank", 2, [](ProcessGroup&) {
    const ProcessGroup group = elastic_group();
    const nlohmann::json facts = nlohmann::json::object();
    RunOptions options{.elastic = true, .save = false, .progress = "off"};
    ddpkit::train::Options declared("mine", "A test.");
    ddpkit::train::declare(declared, options);
    torch::nn::Linear model(4, 2);
    ddpkit::DistributedDataParallel ddp(model, group);
    ddpkit::DistributedSampler sampler(8, group);
    {
      Run run(options, declared, group);
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      CHECK_THROWS_WITH(run.start({.model = *model, .optimizer = optimizer, .sampler = &sampler}, facts),
                        ContainsSubstring("--elastic needs a model in DistributedDataParallel"));
      CHECK_THROWS_WITH(run.start({.model = *model, .optimizer = optimizer, .wrapper = &ddp}, facts),
                        ContainsSubstring("mine lacks the sampler"));
    }
    {
      Run run(options, declared, group);
      ddpkit::optim::ShardedOptimizer<ddpkit::optim::FusedAdamW> optimizer(ddp, torch::optim::AdamWOptions(0.1),
                                                                           {.update_in_backward = true});
      CHECK_THROWS_WITH(
          run.start({.model = *model, .optimizer = optimizer, .wrapper = &ddp, .sampler = &sampler}, facts),
          ContainsSubstring("training cannot continue without a lost rank: a ShardedOptimizer"));
    }
    options.save = options.profile = true;
    CHECK_THROWS_WITH(Run(options, declared, group), ContainsSubstring("--profile"));
  });
}
