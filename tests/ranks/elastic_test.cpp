// The loss of a rank, after which the others continue. 5 random kills on shm, 2 on gloo and 2 with a sharded
// optimizer in a plain run, 100 of each with DDPKIT_TEST_KILLS=200 (script/test --all).
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <ddpkit/ddpkit.h>

#include "ranks/elastic_loss.h"
#include "support/catch.h"
#include "support/folder.h"
#include "support/ranks.h"

namespace {

using ddpkit::InvalidArgument;
using ddpkit::PeerLost;
using ddpkit::ProcessGroup;
using ddpkit::testing::die;
using ddpkit::testing::ElasticSetting;
using ddpkit::testing::make_adam;
using ddpkit::testing::on_ranks;

constexpr int kSamples = 70;
constexpr int kEpochs = 4;

/// Creates a second group of the ranks of a test.
ProcessGroup elastic_group(const std::string& backend, std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  return ddpkit::init_process_group({.backend = backend, .timeout = timeout, .elastic = true});
}

constexpr int kNever = 1 << 20;

struct Kill {
  int rank = 1;
  int step = 0;                                         ///< kNever: after the training.
  std::optional<std::chrono::microseconds> after = {};  ///< After the step's beginning; empty: at its beginning.
};

torch::nn::Sequential make_model() {
  torch::manual_seed(5);
  return torch::nn::Sequential(torch::nn::Linear(6, 64), torch::nn::BatchNorm1d(64), torch::nn::ReLU(),
                               torch::nn::Dropout(0.3), torch::nn::Linear(64, 3));
}

/// Trains with everything that a step changes. Writes weights, buffers and random numbers to `folder`/RANK, where RANK
/// is the number at the start, and the lost ranks and steps to `folder`/lost-RANK.
void train(const ElasticSetting& setting, const std::vector<Kill>& kills, const std::filesystem::path& folder) {
  const ProcessGroup group = elastic_group(setting.backend);
  const int first_rank = group.rank();
  const torch::Tensor inputs = torch::randn({kSamples, 6}, at::make_generator<at::CPUGeneratorImpl>(3));
  const torch::Tensor targets = torch::arange(kSamples).remainder(3);
  torch::nn::Sequential model = make_model();
  torch::manual_seed(100 + static_cast<std::uint64_t>(first_rank));
  ddpkit::DistributedDataParallel ddp(model, group);
  const auto optimizer = make_adam(ddp, model->parameters(), setting.sharded);
  ddpkit::DistributedSampler sampler(kSamples, group);
  ddpkit::optim::GradScaler scaler(group, {.growth_interval = 3});
  double sum = 0;
  std::ofstream lost(folder / ("lost-" + std::to_string(first_rank)));
  std::vector<int> ranks{0, 1, 2, 3};  // Numbers at the start. [rank]
  const ddpkit::optim::Elastic* self = nullptr;
  const auto note = [&](const ddpkit::Regroup& change) {
    for (const int rank : change.lost) lost << ranks[static_cast<std::size_t>(rank)] << ' ' << self->steps() << '\n';
    std::vector<int> rest;
    for (const int rank : change.old_rank_of) rest.push_back(ranks[static_cast<std::size_t>(rank)]);
    ranks = rest;
  };
  ddpkit::optim::Elastic elastic(ddp, sampler, {.on_change = note}, scaler, sum);
  self = &elastic;
  std::vector<std::thread> killers;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    std::map<std::int64_t, int> uses;
    sampler.set_epoch(static_cast<std::uint64_t>(epoch));
    do {
      sampler.reset();
      while (const auto indices = sampler.next(4)) {
        for (const Kill& kill : kills) {
          if (kill.rank != first_rank || kill.step != elastic.steps()) continue;
          if (!kill.after) die();
          killers.emplace_back([kill] {
            std::this_thread::sleep_for(*kill.after);
            die();
          });
        }
        const torch::Tensor chosen =
            torch::tensor(std::vector<std::int64_t>(indices->begin(), indices->end()), torch::kLong);
        model->train(chosen.numel() > 1);  // Batch norm needs two samples.
        torch::Tensor all;
        const bool complete = elastic.step(chosen.numel(), [&] {
          all = group.all_gather(chosen);
          model->zero_grad();
          const torch::Tensor loss = torch::cross_entropy_loss(ddp(inputs.index({chosen})), targets.index({chosen}));
          sum += loss.item<double>();
          scaler.scale(loss).backward();
          scaler.step(*optimizer);
          scaler.update();
        });
        if (!complete) break;
        for (std::int64_t i = 0; i < all.numel(); ++i) ++uses[all.view({-1})[i].item<std::int64_t>()];
      }
    } while (elastic.interrupted());
    int repeated = 0;
    for (const auto& [sample, times] : uses) repeated += times - 1;
    CHECK(std::ssize(uses) == kSamples);
    CHECK(repeated < group.world_size());  // Padding at the end of the epoch.
    double total = 0;
    elastic.retry([&] {
      torch::Tensor of_all = torch::tensor({sum}, torch::kDouble);
      group.all_reduce(of_all);
      total = of_all.item<double>();
    });
    CHECK(total > 0);
  }
  std::ofstream file(folder / std::to_string(first_rank), std::ios::binary);
  std::vector<torch::Tensor> values = model->parameters();
  for (const torch::Tensor& buffer : model->buffers()) values.push_back(buffer);
  values.push_back(torch::randn({4}));  // The state of the generator.
  values.push_back(torch::tensor({sum, scaler.get_scale()}, torch::kDouble));
  ddpkit::testing::write_bytes(file, values);
  for (std::thread& killer : killers) killer.join();
  for (const Kill& kill : kills) {
    if (kill.rank == first_rank) die();
  }
}

std::string read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

/// Sets the step in which each rank was lost, which must be the same on all survivors.
void find_lost(const std::filesystem::path& folder, const std::vector<int>& survivors, std::vector<Kill>& kills) {
  const std::string text = read(folder / ("lost-" + std::to_string(survivors.front())));
  for (const int rank : survivors) CHECK(read(folder / ("lost-" + std::to_string(rank))) == text);
  for (Kill& kill : kills) kill = {.rank = kill.rank, .step = kNever};
  std::istringstream words(text);
  for (int rank = 0, step = 0; words >> rank >> step;) {
    const auto found = std::ranges::find(kills, rank, &Kill::rank);
    REQUIRE(found != kills.end());
    found->step = step;
  }
}

std::size_t first_difference(const std::string& one, const std::string& other) {
  return static_cast<std::size_t>(std::ranges::mismatch(one, other).in1 - one.begin());
}

int kills_wanted(int in_plain_run) {
  const char* text = std::getenv("DDPKIT_TEST_KILLS");
  return text ? std::atoi(text) / 2 : in_plain_run;
}

void check_random_kills(const char* name, const ElasticSetting& setting, int rounds) {
  constexpr int kRanks = 4;
  for (int round = 0; round < rounds; ++round) {
    std::mt19937 dice(static_cast<unsigned>(round));
    std::vector<Kill> kills;
    const int deaths = 1 + round % 2;
    for (int i = 0; i < deaths; ++i)
      kills.push_back({.rank = static_cast<int>((dice() + static_cast<unsigned>(i)) % 2) + 2 * i,
                       .step = static_cast<int>(dice() % 12),
                       .after = std::chrono::microseconds(dice() % 3000)});
    std::vector<int> doomed, survivors;
    for (const Kill& kill : kills) doomed.push_back(kill.rank);
    for (int r = 0; r < kRanks; ++r) {
      if (std::ranges::count(doomed, r) == 0) survivors.push_back(r);
    }
    const ddpkit::testing::Folder disturbed, calm;
    on_ranks(name, kRanks, [&](ProcessGroup&) { train(setting, kills, disturbed.path()); }, {.doomed = doomed});
    find_lost(disturbed.path(), survivors, kills);
    on_ranks(name, kRanks, [&](ProcessGroup&) { train(setting, kills, calm.path()); }, {.doomed = doomed});
    for (const int rank : survivors) {
      INFO("round " << round << ", rank " << rank);
      const std::string result = read(calm.path() / std::to_string(rank));
      CHECK(!result.empty());
      CHECK(first_difference(result, read(disturbed.path() / std::to_string(rank))) == result.size());
    }
  }
}

}  // namespace

TEST_CASE("the result after random kills is that of ranks which leave between two steps", "[ranks][shm][elastic]") {
  check_random_kills("the result after random kills is that of ranks which leave between two steps", {"shm"},
                     kills_wanted(5));
}

TEST_CASE("the result on gloo after random kills is that of ranks which leave between two steps", "[ranks][elastic]") {
  check_random_kills("the result on gloo after random kills is that of ranks which leave between two steps", {"gloo"},
                     kills_wanted(2));
}

TEST_CASE("the result with a sharded optimizer after random kills is that of ranks which leave between two steps",
          "[ranks][shm][elastic]") {
  check_random_kills(
      "the result with a sharded optimizer after random kills is that of ranks which leave between two steps",
      {"shm", /*sharded=*/true}, kills_wanted(2));
}

TEST_CASE("shrink() continues without lost ranks, also without the rank that serves the store",
          "[ranks][shm][elastic]") {
  for (const std::string backend : {"shm", "gloo"}) {
    CAPTURE(backend);
    on_ranks("shrink() continues without lost ranks, also without the rank that serves the store", 4,
             [&](ProcessGroup& outer) {
               const ProcessGroup group = elastic_group(backend), copy = group;
               CHECK_THROWS_AS(group.shrink(), InvalidArgument);
               CHECK_THROWS_AS(group.split({0, 1}), InvalidArgument);
               const int first_rank = outer.rank();
               if (first_rank == 0) die();
               CHECK_THROWS_AS(group.barrier(), PeerLost);
               const ddpkit::Regroup change = group.shrink();
               CHECK(change.generation == 1);
               CHECK(change.lost == std::vector<int>{0});
               CHECK(change.old_rank_of == std::vector<int>{1, 2, 3});
               CHECK(copy.rank() == first_rank - 1);
               CHECK(copy.world_size() == 3);
               CHECK(group.local_world_size() == 3);
               torch::Tensor sum = torch::full({100000}, first_rank);
               copy.all_reduce(sum);
               CHECK(sum.eq(6).all().item<bool>());
               if (first_rank == 2) die();
               try {
                 group.all_reduce(sum);
                 FAIL("an all-reduce without rank 2");
               } catch (const PeerLost& error) {
                 CHECK(error.context().rank == 2);  // The number at the start.
               }
               const auto again = group.shrink(2);
               CHECK(again.lost == std::vector<int>{1});
               CHECK(group.generation() == 2);
               sum.fill_(first_rank);
               group.all_reduce(sum);
               CHECK(sum.eq(4).all().item<bool>());
               if (first_rank == 3) die();
               CHECK_THROWS_AS(group.barrier(), PeerLost);
               CHECK_THROWS_AS(group.shrink(2), PeerLost);
             },
             {.doomed = {0, 2, 3}});
  }
}

TEST_CASE("a silent rank is an error after the loss of another", "[ranks][shm][elastic]") {
  on_ranks("a silent rank is an error after the loss of another", 3,
           [](ProcessGroup& fixed) {
             const ProcessGroup group = elastic_group("shm", std::chrono::seconds(1));
             if (fixed.rank() == 2) die();
             if (fixed.rank() == 0) {
               CHECK_THROWS_AS(group.barrier(), PeerLost);
               try {
                 group.shrink();
                 FAIL("a group without rank 1, which runs");
               } catch (const ddpkit::Timeout& error) {
                 CHECK(error.context().rank == 1);
               }
               fixed.send(torch::ones({1}), 1);
             }
             torch::Tensor message = torch::zeros({1});
             if (fixed.rank() == 1) fixed.recv(message, 0);
           },
           {.doomed = {2}});
}

TEST_CASE("after regroup() each rank has its own buffers", "[ranks][shm][elastic]") {
  on_ranks("after regroup() each rank has its own buffers", 3,
           [](ProcessGroup& fixed) {
             const ProcessGroup group = elastic_group("shm");
             torch::nn::BatchNorm1d model(6);
             ddpkit::DistributedDataParallel ddp(model, group, {.broadcast_buffers = false});
             const auto train = [&] { ddp(torch::ones({4, 6})).sum().backward(); };
             const torch::NoGradGuard no_grad;
             model->running_mean.fill_(fixed.rank());
             if (fixed.rank() == 0) die();
             CHECK_THROWS_AS(group.barrier(), PeerLost);
             group.shrink();
             ddp.regroup();
             CHECK(model->running_mean.eq(fixed.rank()).all().item<bool>());
             const torch::AutoGradMode grad(true);
             train();
             group.barrier();
           },
           {.doomed = {0}});
}

/// Returns how many arenas this process maps: its own and those of other ranks.
std::ptrdiff_t mapped_arenas() {
  const std::string maps = ddpkit::testing::read_file("/proc/self/maps");
  std::istringstream lines(maps);
  std::set<std::string> names;
  for (std::string line; std::getline(lines, line);) {
    if (const auto at = line.find("ddpkit:segment-"); at != std::string::npos) names.insert(line.substr(at));
  }
  return std::ssize(names);
}

TEST_CASE("after regroup() gradients are reduced in the same memory", "[ranks][shm][elastic]") {
  on_ranks("after regroup() gradients are reduced in the same memory", 4,
           [](ProcessGroup& fixed) {
             const ProcessGroup group = elastic_group("shm");
             torch::nn::Linear model(torch::nn::LinearOptions(64, 64).bias(false));
             ddpkit::DistributedDataParallel ddp(model, group);
             const auto train = [&] {
               model->weight.mutable_grad().reset();
               ddp(torch::full({1, 64}, fixed.rank(), at::kFloat)).sum().backward();
             };
             train();
             const torch::Tensor kept = torch::full({5000}, fixed.rank());
             CHECK(mapped_arenas() == 4);
             double sum = 6;
             for (const int lost : {0, 2}) {
               const auto before = ddp.reducer().arena().value();
               if (fixed.rank() == lost) die();
               CHECK_THROWS_AS(train(), PeerLost);
               group.shrink();
               ddp.regroup();
               const auto after = ddp.reducer().arena().value();
               CHECK(after.reserved >= before.reserved);
               CHECK(after.allocations >= before.allocations);
               CHECK(mapped_arenas() == group.world_size());
               sum -= lost;
               train();
               CHECK(model->weight.grad().allclose(torch::full({64, 64}, sum / group.world_size())));
               CHECK(kept.eq(fixed.rank()).all().item<bool>());
             }
             if (fixed.rank() == 1) die();
             CHECK_THROWS_AS(train(), PeerLost);
             group.shrink();
             ddp.regroup();
             train();
             CHECK(model->weight.grad().eq(3).all().item<bool>());
             CHECK(kept.eq(3).all().item<bool>());
           },
           {.doomed = {0, 1, 2}});
}

TEST_CASE("Elastic undoes nothing that cannot be undone", "[ranks][shm][elastic]") {
  on_ranks("Elastic undoes nothing that cannot be undone", 3,
           [](ProcessGroup& fixed) {
             const ProcessGroup group = elastic_group("shm");
             torch::nn::Sequential model = make_model();
             ddpkit::DistributedSampler sampler(kSamples, group);
             {
               ddpkit::DistributedDataParallel ddp(model, fixed);
               CHECK_THROWS_AS(ddpkit::optim::Elastic(ddp, sampler), InvalidArgument);
             }
             ddpkit::DistributedDataParallel ddp(model, group);
             CHECK_THROWS_AS(ddpkit::optim::Elastic(ddp, sampler, {.min_ranks = 0}), InvalidArgument);
             ddpkit::testing::check_torn_step(ddp, sampler, torch::ones({4, 6}), fixed.rank() == 2);
           },
           {.doomed = {2}});
}

RANK_TEST("a rank whose program aborts an elastic group leaves it", "[elastic]", 2, 3) {
  CHECK_THROWS_AS(ddpkit::init_process_group({.backend = "hierarchical", .elastic = true}), InvalidArgument);
  for (const std::string backend : {"shm", "gloo"}) {
    CAPTURE(backend);
    const ProcessGroup elastic = elastic_group(backend);
    if (group.rank() == 0) {
      elastic.abort("a bad batch");
      CHECK_THROWS_AS(elastic.shrink(), InvalidArgument);
      CHECK_THROWS_WITH(elastic.barrier(), ContainsSubstring("a bad batch"));
    } else {
      // Other ranks may complete the same collectives without knowing the failure. So only a collective throws it.
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      CHECK_NOTHROW(elastic.check());
      CHECK_THROWS_WITH(elastic.barrier(), ContainsSubstring("a bad batch"));
      CHECK_NOTHROW(elastic.check());
      CHECK(elastic.shrink().lost == std::vector<int>{0});
      CHECK(elastic.world_size() == group.world_size() - 1);
      elastic.barrier();
    }
    group.barrier();
  }
}
