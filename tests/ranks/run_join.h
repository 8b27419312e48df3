// Runs whose lost ranks are replaced: the worker, and what its tests share.
#pragma once

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
#include <ddpkit/parallel/distributed_data_parallel.h>

#include "comm/trace/event_ring.h"
#include "ranks/elastic_loss.h"
#include "ranks/elastic_run.h"
#include "support/catch.h"
#include "support/folder.h"

namespace ddpkit::testing {

inline constexpr int kJoinSize = 150;
inline constexpr int kJoinEpochs = 3;
using Environment = std::vector<std::pair<std::string, std::string>>;

inline constexpr const char* kJoinWorker = "a rank of a run that new ranks join";

inline std::int64_t test_number(const char* name) {
  const char* const text = std::getenv(name);
  return text ? std::atoll(text) : -1;
}

/// Waits on rank 0 until a new rank waits.
inline void wait_for_new_rank() {
  const auto start = std::chrono::steady_clock::now();
  while (!EventRing::of_process().others_join()) {
    REQUIRE(std::chrono::steady_clock::now() - start < std::chrono::seconds(100));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

/// Starts ranks of the test case kJoinWorker, which calls run_join_worker(). Returns what rank 0 reports.
inline std::string launch_joined(const std::string& backend, const Folder& folder, int ranks, Environment environment) {
  environment.emplace_back("TEST_BACKEND", backend);
  environment.emplace_back("TEST_FOLDER", folder.path());
  environment.emplace_back("OMP_NUM_THREADS", "1");
  std::string output;
  const auto result =
      launch({.command = {std::filesystem::read_symlink("/proc/self/exe").string(), "--in-process", kJoinWorker},
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
inline std::string step_after(const std::string& text, const std::string& words) {
  INFO(text);
  const auto at = text.find(words);
  REQUIRE(at != std::string::npos);
  return std::to_string(std::stoi(text.substr(at + words.size())));
}

/// TEST_DEATH: the update before which rank 1 ends. TEST_WAIT: the update in which the others wait for the new rank.
/// TEST_SIGNAL: what they send to the new rank then.
inline void run_join_worker() {
  const ProcessGroup group = elastic_group(std::getenv("TEST_BACKEND"));
  const bool is_new = group.is_joining();
  const std::string folder = std::getenv("TEST_FOLDER");
  train::RunOptions options = elastic_options(kJoinEpochs, is_new ? "" : folder + "/run", 1);
  if (const std::int64_t most = test_number("TEST_STEPS"); most >= 0) options.max_steps = most;
  train::Options declared("mine", "A test.");
  train::declare(declared, options);
  const torch::Tensor inputs =
      torch::randn({kJoinSize, 6}, at::make_generator<at::CPUGeneratorImpl>(3)).to(group.device());
  const torch::Tensor targets = torch::arange(kJoinSize).remainder(3).to(group.device());
  train::Run run(options, declared, group);
  CHECK(run.is_main() == (!is_new && group.rank() == 0));
  torch::manual_seed(is_new ? 99 : 7);
  auto model = torch::nn::Sequential(torch::nn::Linear(6, 64), torch::nn::BatchNorm1d(64), torch::nn::ReLU(),
                                     torch::nn::Linear(64, 3));
  model->to(group.device());
  DistributedDataParallel ddp(model.ptr(), group, {.parameters_to_ignore = {"1.num_batches_tracked"}});
  const auto optimizer = make_adam(ddp, model->parameters(), test_number("TEST_SHARDED") == 1);
  DistributedSampler sampler(kJoinSize, group, {.seed = 1});
  if (is_new) {
    std::ofstream(folder + "/pid") << ::getpid() << std::flush;
    while (!std::filesystem::exists(folder + "/waits")) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  run.start({.model = *model, .optimizer = *optimizer, .wrapper = &ddp, .sampler = &sampler}, {{"data", "test"}});
  CHECK_FALSE(group.is_joining());
  CHECK(run.is_main() == (group.rank() == 0));
  while (run.has_epoch()) {
    train::Epoch epoch(run, "samples");
    torch::Tensor losses;
    epoch.retry([&] {
      losses = torch::zeros({1}).to(group.device());
      for (std::int64_t i = 0; epoch.next(); ++i) {
        if (run.step() == test_number("TEST_DEATH") && test_number("RANK") == 1 && !is_new) die();
        if (run.step() == test_number("TEST_WAIT") && group.rank() == 0) {
          write_file(folder + "/waits", "");
          wait_for_new_rank();
          if (test_number("TEST_SIGNAL") > 0)
            ::kill(std::stoi(read_file(folder + "/pid")), static_cast<int>(test_number("TEST_SIGNAL")));
        }
        const torch::Tensor chosen = torch::tensor(epoch.batch(i)).to(group.device());
        model->zero_grad();
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
  for (torch::Tensor& value : values) value = value.detach().cpu();
  values.push_back(torch::tensor({run.scheduler().learning_rates().front()}, torch::kDouble));
  torch::save(values, folder + "/values.pt");
}

/// Runs 3 ranks of which one is replaced. Their weights have the bits of runs that resume with the same ranks.
inline void check_joined_run(const std::string& backend, bool sharded = false) {
  const Folder joined, resumed;
  const auto start = [&](const Folder& folder, int ranks, Environment environment) {
    environment.emplace_back("TEST_SHARDED", sharded ? "1" : "0");
    return launch_joined(backend, folder, ranks, std::move(environment));
  };
  const std::string output = start(joined, 3, {{"TEST_DEATH", "7"}, {"TEST_WAIT", "16"}});
  INFO(output);
  const std::string lost = step_after(output, "; 2 ranks continue from step ");
  const std::string join = step_after(output, "; 3 ranks continue from step ");
  CHECK(lost == "7");
  CHECK(join == "18");
  start(resumed, 3, {{"TEST_STEPS", lost}});
  start(resumed, 2, {{"TEST_STEPS", join}});
  start(resumed, 3, {});
  std::vector<torch::Tensor> found, expected;
  torch::load(found, joined / "values.pt");
  torch::load(expected, resumed / "values.pt");
  REQUIRE(found.size() == expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    INFO("tensor " << i);
    CHECK(torch::equal(found[i], expected[i]));
  }
  const auto info = train::read_checkpoint_info(joined / "run/checkpoint.pt");
  CHECK(info.epoch == kJoinEpochs);
  CHECK(info.ranks == 3);
  CHECK(nlohmann::json::parse(info.config)["world_size"] == 3);
}

}  // namespace ddpkit::testing
