// Run with RunOptions::elastic: a new process joins the others instead of a lost rank.
#include <ddpkit/train/run.h>
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/data/distributed_sampler.h>
#include <ddpkit/launch/launcher.h>
#include <ddpkit/optim/fused_adam.h>
#include <ddpkit/parallel/distributed_data_parallel.h>

#include "comm/trace/event_ring.h"
#include "ranks/elastic_loss.h"
#include "ranks/elastic_run.h"
#include "support/catch.h"
#include "support/folder.h"

using ddpkit::testing::Folder;
using ddpkit::testing::read_file;
using ddpkit::train::Epoch;
using ddpkit::train::Run;
using ddpkit::train::RunOptions;

namespace {

constexpr int kDataSize = 150;
constexpr int kRunEpochs = 3;
constexpr const char* kWorker = "a rank of a run that new ranks join";

std::int64_t number(const char* name) {
  const char* const text = std::getenv(name);
  return text ? std::atoll(text) : -1;
}

/// Waits on rank 0 until a new rank waits.
void wait_for_new_rank() {
  const auto start = std::chrono::steady_clock::now();
  while (!ddpkit::EventRing::of_process().others_join()) {
    REQUIRE(std::chrono::steady_clock::now() - start < std::chrono::seconds(100));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

/// Starts ranks of the worker below, and returns what rank 0 reports.
std::string launch(const Folder& folder, int ranks, std::vector<std::pair<std::string, std::string>> environment) {
  environment.emplace_back("TEST_FOLDER", folder.path());
  environment.emplace_back("OMP_NUM_THREADS", "1");
  std::string output;
  const auto result = ddpkit::launch(
      {.command = {std::filesystem::read_symlink("/proc/self/exe").string(), "--in-process", kWorker},
       .ranks = ranks,
       .environment = std::move(environment),
       .time_limit = std::chrono::seconds(200),
       .min_ranks = 1,
       .max_replacements = 1,
       .on_output = [&](int rank, const std::string& text) { output += fmt::format("{}: {}", rank, text); }});
  INFO(output);
  REQUIRE_FALSE(result.timed_out);
  REQUIRE(result.exit_code() == 0);
  return output;
}

/// Returns the number after `words`.
std::string step_after(const std::string& text, const std::string& words) {
  INFO(text);
  const auto at = text.find(words);
  REQUIRE(at != std::string::npos);
  return std::to_string(std::stoi(text.substr(at + words.size())));
}

}  // namespace

// TEST_DEATH: the update before which rank 1 ends. TEST_WAIT: the update in which the others wait for the new rank.
// TEST_SIGNAL: what they send to the new rank then.
TEST_CASE("a rank of a run that new ranks join", "[.worker]") {
  const ddpkit::ProcessGroup group = ddpkit::testing::elastic_group();
  const bool is_new = group.is_joining();
  const std::string folder = std::getenv("TEST_FOLDER");
  RunOptions options = ddpkit::testing::elastic_options(kRunEpochs, is_new ? "" : folder + "/run", 1);
  if (const std::int64_t most = number("TEST_STEPS"); most >= 0) options.max_steps = most;
  ddpkit::train::Options declared("mine", "A test.");
  ddpkit::train::declare(declared, options);
  const torch::Tensor inputs = torch::randn({kDataSize, 6}, at::make_generator<at::CPUGeneratorImpl>(3));
  const torch::Tensor targets = torch::arange(kDataSize).remainder(3);
  Run run(options, declared, group);
  CHECK(run.is_main() == (!is_new && group.rank() == 0));
  torch::manual_seed(is_new ? 99 : 7);
  auto model = torch::nn::Sequential(torch::nn::Linear(6, 64), torch::nn::BatchNorm1d(64), torch::nn::ReLU(),
                                     torch::nn::Linear(64, 3));
  ddpkit::DistributedDataParallel ddp(model.ptr(), group);
  ddpkit::optim::FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(options.lr));
  ddpkit::DistributedSampler sampler(kDataSize, group, {.seed = 1});
  if (is_new) std::ofstream(folder + "/pid") << ::getpid() << std::flush;
  run.start({.model = *model, .optimizer = optimizer, .wrapper = &ddp, .sampler = &sampler}, {{"data", "test"}});
  CHECK_FALSE(group.is_joining());
  CHECK(run.is_main() == (group.rank() == 0));
  while (run.has_epoch()) {
    Epoch epoch(run, "samples");
    torch::Tensor losses;
    epoch.retry([&] {
      losses = torch::zeros({1});
      for (std::int64_t i = 0; epoch.next(); ++i) {
        if (run.step() == number("TEST_DEATH") && number("RANK") == 1 && !is_new) ddpkit::testing::die();
        if (run.step() == number("TEST_WAIT") && group.rank() == 0) {
          wait_for_new_rank();
          if (number("TEST_SIGNAL") > 0)
            ::kill(std::stoi(read_file(folder + "/pid")), static_cast<int>(number("TEST_SIGNAL")));
        }
        const torch::Tensor chosen = torch::tensor(epoch.batch(i));
        optimizer.zero_grad();
        model->train(chosen.numel() > 1);  // Batch norm needs two samples.
        const torch::Tensor loss = torch::cross_entropy_loss(ddp(inputs.index({chosen})), targets.index({chosen}));
        loss.backward();
        run.step_optimizer();
        losses += loss.detach();
        epoch.advance();
      }
      group.all_reduce(losses);
    });
    if (!epoch.finish(losses.item<double>())) break;
    run.save();
  }
  CHECK(run.finish());
  if (group.rank() != group.world_size() - 1) return;  // A new rank is the last one.
  std::vector<torch::Tensor> values = model->parameters();
  for (const torch::Tensor& buffer : model->buffers()) values.push_back(buffer);
  values.push_back(torch::tensor({run.scheduler().learning_rates().front()}, torch::kDouble));
  torch::save(values, folder + "/values.pt");
}

TEST_CASE("a run that a new rank joins ends as one that resumes with that rank", "[ranks][train][elastic]") {
  const Folder joined, resumed;
  const std::string output = launch(joined, 3, {{"TEST_DEATH", "7"}, {"TEST_WAIT", "16"}});
  INFO(output);
  const std::string lost = step_after(output, "; 2 ranks continue from step ");
  const std::string join = step_after(output, "; 3 ranks continue from step ");
  CHECK(lost == "7");
  CHECK(join == "18");
  launch(resumed, 3, {{"TEST_STEPS", lost}});
  launch(resumed, 2, {{"TEST_STEPS", join}});
  launch(resumed, 3, {});
  std::vector<torch::Tensor> found, expected;
  torch::load(found, joined / "values.pt");
  torch::load(expected, resumed / "values.pt");
  REQUIRE(found.size() == expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    INFO("tensor " << i);
    CHECK(torch::equal(found[i], expected[i]));
  }
  const auto info = ddpkit::train::read_checkpoint_info(joined / "run/checkpoint.pt");
  CHECK(info.epoch == kRunEpochs);
  CHECK(info.ranks == 3);
  CHECK(nlohmann::json::parse(info.config)["world_size"] == 3);
}

TEST_CASE("a run continues without a new rank that has ended before it joined", "[ranks][train][elastic]") {
  const Folder folder;
  const std::string output =
      launch(folder, 3, {{"TEST_DEATH", "7"}, {"TEST_WAIT", "16"}, {"TEST_SIGNAL", std::to_string(SIGKILL)}});
  CHECK_THAT(output, ContainsSubstring("; 2 ranks continue from step 7\n"));
  CHECK_THAT(output, !ContainsSubstring("no new rank joins"));
  CHECK(ddpkit::train::read_checkpoint_info(folder / "run/checkpoint.pt").epoch == kRunEpochs);
}

TEST_CASE("a run continues without a new rank that does not answer", "[ranks][train][elastic]") {
  const Folder folder;
  const std::string output =
      launch(folder, 3, {{"TEST_DEATH", "7"}, {"TEST_WAIT", "16"}, {"TEST_SIGNAL", std::to_string(SIGSTOP)}});
  CHECK_THAT(output, ContainsSubstring("no new rank joins"));
  CHECK_THAT(output, ContainsSubstring("; 2 ranks continue from step 18\n"));
  CHECK(ddpkit::train::read_checkpoint_info(folder / "run/checkpoint.pt").epoch == kRunEpochs);
}

TEST_CASE("a run that ends before a new rank has joined does not wait for it", "[ranks][train][elastic]") {
  const Folder folder;
  const std::string output = launch(folder, 3, {{"TEST_DEATH", "35"}});
  INFO(output);
  CHECK_THAT(output, ContainsSubstring("; 2 ranks continue from step 35\n"));
  CHECK(ddpkit::train::read_checkpoint_info(folder / "run/checkpoint.pt").epoch == kRunEpochs);
}
