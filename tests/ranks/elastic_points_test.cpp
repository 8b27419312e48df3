// A rank of an elastic training ends at each point of a step, of retry(), and of the recovery from another loss. The
// points within collectives and within shrink() are those of tests/schedules/failures_test.cpp.
#include <torch/torch.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ddpkit/ddpkit.h>

#include "ranks/elastic_loss.h"
#include "support/catch.h"
#include "support/folder.h"
#include "support/ranks.h"

namespace {

using ddpkit::ProcessGroup;
using ddpkit::testing::ElasticSetting;
using ddpkit::testing::Folder;
using ddpkit::testing::on_ranks;
using ddpkit::testing::read_file;

constexpr int kRanks = 4;
constexpr int kStep = 2;   ///< Complete steps before the deaths.
constexpr int kSteps = 5;  ///< In all.
constexpr int kLinears = 4;

struct Death {
  int rank = 1;
  std::string point;
  int step = kStep;  ///< Complete steps before.
};

struct Net : torch::nn::Module {
  Net() {
    for (int i = 0; i < kLinears; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(16, 16)));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (int i = 0; i < kLinears; ++i) {
      if (i == kLinears / 2) in_the_middle();
      x = torch::tanh(layers[static_cast<std::size_t>(i)]->forward(x));
    }
    return x;
  }
  std::function<void()> in_the_middle = [] {};
  std::vector<torch::nn::Linear> layers;
};

/// An object of Elastic that notices when Elastic restores it.
struct Witness {
  explicit Witness(std::function<void()> action) : on_restore(std::move(action)) {}
  Witness(const Witness&) {}  // The saved copy.
  Witness& operator=(const Witness&) {
    if (on_restore) on_restore();
    return *this;
  }
  std::function<void()> on_restore;
};

/// Writes the weights to `folder`/RANK, where RANK is the number at the start.
void train(const ElasticSetting& setting, const std::vector<Death>& deaths, const Folder& folder) {
  const ProcessGroup group =
      ddpkit::init_process_group({.backend = setting.backend, .timeout = std::chrono::seconds(60), .elastic = true});
  const int first_rank = group.rank();
  const ddpkit::optim::Elastic* self = nullptr;
  const auto reach = [&](const std::string& point) {
    for (const Death& death : deaths) {
      if (death.rank == first_rank && death.point == point && death.step == self->steps()) ddpkit::testing::die();
    }
  };
  torch::manual_seed(5);
  const auto model = std::make_shared<Net>();
  const torch::Tensor inputs = torch::randn({64, 16});
  ddpkit::DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 1e-3, .first_bucket_cap_mb = 1e-3});
  const auto optimizer = ddpkit::testing::make_adam(ddp, model->parameters(), setting.sharded);
  ddpkit::DistributedSampler sampler(64, group);
  Witness witness([&] { reach("undo"); });
  ddpkit::optim::Elastic elastic(ddp, sampler, {.on_change = [&](const ddpkit::Regroup&) { reach("regroup"); }},
                                 witness);
  self = &elastic;
  model->in_the_middle = [&] { reach("forward"); };
  for (int i = 0; i < kLinears; ++i)
    model->layers[static_cast<std::size_t>(i)]->weight.register_hook(
        [&reach, i](const torch::Tensor&) { reach("gradient " + std::to_string(i)); });
  do {
    sampler.reset();
    while (elastic.steps() < kSteps) {
      const auto indices = sampler.next(2);
      REQUIRE(indices);
      const torch::Tensor chosen = torch::tensor(std::vector<std::int64_t>(indices->begin(), indices->end()));
      reach("step");
      const bool complete = elastic.step(2, [&] {
        model->zero_grad();
        ddp(inputs.index({chosen})).pow(2).sum().backward();
        reach("backward");
        optimizer->step();
        reach("update");
      });
      if (!complete) break;
      if (elastic.steps() != kStep) continue;
      CHECK(ddp.stats().buckets.size() > 2);
      elastic.retry([&] {
        reach("retry");
        group.barrier();
        reach("end of retry");
      });
    }
  } while (elastic.interrupted());
  std::ofstream file(folder / std::to_string(first_rank), std::ios::binary);
  ddpkit::testing::write_bytes(file, model->parameters());
}

/// Compares with a training in which the ranks leave before step `lost`.
void compare(const char* name, const ElasticSetting& setting, const std::vector<Death>& deaths, int lost = kStep) {
  std::vector<int> doomed;
  std::vector<Death> leaving;
  for (const Death& death : deaths) {
    INFO("rank " << death.rank << " at: " << death.point);
    doomed.push_back(death.rank);
    leaving.push_back({.rank = death.rank, .point = "step", .step = lost});
  }
  const Folder disturbed, calm;
  on_ranks(name, kRanks, [&](ProcessGroup&) { train(setting, deaths, disturbed); }, {.doomed = doomed});
  on_ranks(name, kRanks, [&](ProcessGroup&) { train(setting, leaving, calm); }, {.doomed = doomed});
  for (int rank = 0; rank < kRanks; ++rank) {
    if (std::find(doomed.begin(), doomed.end(), rank) != doomed.end()) continue;
    INFO("rank " << rank << " after the loss of rank " << deaths.front().rank << " at: " << deaths.front().point);
    const std::string result = read_file(calm / std::to_string(rank));
    CHECK(!result.empty());
    CHECK((result == read_file(disturbed / std::to_string(rank))));
  }
}

}  // namespace

TEST_CASE("a rank ends at each point of a step or of retry()", "[ranks][shm][elastic]") {
  const char* name = "a rank ends at each point of a step or of retry()";
  for (const int rank : {0, 3}) {
    std::vector<std::string> points = {"forward", "retry", "end of retry"};
    for (int i = 0; i < kLinears; ++i) points.push_back("gradient " + std::to_string(i));
    for (const std::string& point : points) compare(name, {"shm"}, {{.rank = rank, .point = point}});
    // The others have all gradients, and complete the step.
    for (const char* point : {"backward", "update"})
      compare(name, {"shm"}, {{.rank = rank, .point = point}}, kStep + 1);
  }
}

TEST_CASE("a second rank ends while the others recover", "[ranks][shm][elastic]") {
  const char* name = "a second rank ends while the others recover";
  for (const int second : {0, 2}) {
    for (const char* point : {"undo", "regroup"})
      compare(name, {"shm"}, {{.rank = 1, .point = "forward"}, {.rank = second, .point = point}});
  }
}

TEST_CASE("a rank with a part of the optimizer's state ends at each point of a step", "[ranks][shm][elastic]") {
  const char* name = "a rank with a part of the optimizer's state ends at each point of a step";
  const ElasticSetting sharded{"shm", true};
  for (const int rank : {0, 3}) {
    // The others have updated their shards, and undo that.
    for (const char* point : {"forward", "gradient 1", "backward", "retry"})
      compare(name, sharded, {{.rank = rank, .point = point}});
    compare(name, sharded, {{.rank = rank, .point = "update"}}, kStep + 1);
  }
  // A second rank ends while the others recover.
  for (const int second : {0, 2}) {
    for (const char* point : {"undo", "regroup"})
      compare(name, sharded, {{.rank = 1, .point = "backward"}, {.rank = second, .point = point}});
  }
}

TEST_CASE("a rank of a gloo group ends at points of a step or of retry()", "[ranks][elastic]") {
  const char* name = "a rank of a gloo group ends at points of a step or of retry()";
  for (const char* point : {"forward", "end of retry"}) compare(name, {"gloo"}, {{.rank = 0, .point = point}});
  for (const char* point : {"gradient 1", "retry"}) compare(name, {"gloo"}, {{.rank = 3, .point = point}});
  // The others have all gradients, and complete the step.
  compare(name, {"gloo"}, {{.rank = 0, .point = "backward"}}, kStep + 1);
  compare(name, {"gloo"}, {{.rank = 3, .point = "update"}}, kStep + 1);
  // A second rank ends while the others recover.
  compare(name, {"gloo"}, {{.rank = 1, .point = "forward"}, {.rank = 0, .point = "undo"}});
  compare(name, {"gloo"}, {{.rank = 1, .point = "forward"}, {.rank = 2, .point = "regroup"}});
}
