// Tests of the command `ddpkit bench step` and its parts.
#include <torch/torch.h>

#include <algorithm>
#include <limits>
#include <map>

#include "bench/step_models.h"
#include "bench/step_plan.h"
#include "bench/step_rank.h"
#include "bench/step_row.h"
#include "bench/workers.h"
#include "cli/run_ddpkit.h"
#include "gpu/gpu.h"
#include "support/ranks.h"

using namespace ddpkit::bench;
using ddpkit::testing::Folder;
using ddpkit::testing::names_in;
using ddpkit::testing::read_file;
using ddpkit::testing::Run;
using ddpkit::testing::run_bench;
using ddpkit::testing::split;

namespace {

/// Returns the rows of a CSV file by the names in its header.
std::vector<std::map<std::string, std::string>> rows_of(const std::string& csv) {
  const std::vector<std::string> lines = split(read_file(csv), '\n');
  REQUIRE(!lines.empty());
  REQUIRE(lines[0] == kStepCsvHeader);
  const std::vector<std::string> names = split(lines[0], ',');
  std::vector<std::map<std::string, std::string>> rows;
  for (std::size_t i = 1; i < lines.size(); ++i) {
    const std::vector<std::string> fields = split(lines[i], ',');
    REQUIRE(fields.size() == names.size());
    auto& row = rows.emplace_back();
    for (std::size_t column = 0; column < names.size(); ++column) row[names[column]] = fields[column];
  }
  return rows;
}

struct MeasuredSteps {
  Run run;
  std::vector<std::map<std::string, std::string>> rows;
};

/// Runs `ddpkit bench step OPTIONS`, which must succeed.
MeasuredSteps measure_steps(const Folder& folder, std::vector<std::string> options) {
  const std::string csv = folder / "rows.csv";
  options.insert(options.begin(), "step");
  options.insert(options.end(), {"--csv", csv});
  const Run run = run_bench(folder, options);
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  return {run, rows_of(csv)};
}

}  // namespace

TEST_CASE("ddpkit bench step measures a step alone and on ranks, with several bucket caps", "[bench]") {
  const Folder folder;
  const auto [run, rows] = measure_steps(
      folder, {"--model", "mlp-10k,cnn", "--backend", "shm", "--steps", "4", "--bucket-cap-mb", "default,0.001,one"});
  REQUIRE(rows.size() == 12);
  REQUIRE(run.lines.size() == rows.size() + 2);  // The header has two lines.
  for (std::size_t i = 0; i < rows.size(); ++i) {
    auto row = rows[i];
    CAPTURE(run.lines[i + 2]);
    CHECK(run.lines[i + 2].starts_with(row["system"] + " "));
    CHECK(row["model"] == (i < 6 ? "mlp-10k" : "cnn"));
    CHECK(row["params"] == (i < 6 ? "9638" : "29846"));
    CHECK(row["batch"] == "32");
    CHECK(std::stod(row["us"]) > 0);
    CHECK(std::stod(row["ratio_to_alone"]) > 0);
    CHECK(std::stoull(row["peak_bytes"]) > 50'000'000);
    CHECK(row["wrong"] == "0");
    const bool is_alone = i % 6 < 3;
    const std::vector<std::string> systems = {"alone",      "alone-x2",   "alone-barrier",
                                              "ddpkit-shm", "ddpkit-shm", "ddpkit-shm"};
    CHECK(row["system"] == systems[i % 6]);
    CHECK(row["ranks"] == (i % 6 == 0 ? "1" : "2"));
    CHECK(row["exposed_us"].empty() == is_alone);
    if (is_alone) continue;
    CHECK(row["bucket_cap_mb"] == (i % 6 == 3 ? "default" : i % 6 == 4 ? "0.001" : "one"));
    CHECK(std::stoi(row["buckets"]) >= (i % 6 == 4 ? 2 : 1));
    if (i % 6 == 5) CHECK(row["buckets"] == "1");
    CHECK(std::stoull(row["reduced_bytes"]) >= 4 * std::stoull(row["params"]));
  }
  CHECK(rows[0].at("ratio_to_alone") == "1.0000");
}

TEST_CASE("ddpkit bench step takes any MLP, three ranks, another batch and optimizer", "[bench][gloo][.long]") {
  const Folder folder;
  auto [run, rows] = measure_steps(folder, {"--hidden", "8", "--layers", "1", "-n", "3", "--batch", "4", "--update",
                                            "torch", "--optimizer", "adamw", "--steps", "2"});
  const bool has_gloo = run.errors.find("gloo skipped: ") == std::string::npos;
  REQUIRE(rows.size() == (has_gloo ? 5 : 4));
  for (auto& row : rows) {
    CHECK(row["model"] == "mlp-8x1");
    CHECK(row["params"] == std::to_string(561 * 8 + 8 + 8 * 6 + 6));
    CHECK(row["batch"] == "4");
    CHECK(row["optimizer"] == "adamw");
    CHECK(row["wrong"] == "0");
  }
  CHECK(rows[1]["system"] == "alone-x3");
  CHECK(rows.back()["system"] == (has_gloo ? "ddpkit-gloo" : "ddpkit-shm"));
}

TEST_CASE("ddpkit bench step refuses wrong options in one sentence, before it measures", "[bench]") {
  const Folder folder;
  const std::vector<std::pair<std::vector<std::string>, std::string>> wrong = {
      {{"--backend", "nccl"}, "--backend nccl has no use for --device cpu"},
      {{"--update", "graphed"}, "--update graphed needs --device cuda"},
      {{"--device", "cuda", "-n", "4000"}, "--device cuda: "},
      {{"--model", "mlp"}, "no model \"mlp\"; there are mlp-10k"},
      {{"--model", "mlp-0x3"}, "no model \"mlp-0x3\""},
      {{"--model", "mlp-8x3x"}, "no model"},
      {{"--hidden", "0"}, "not '0'"},
      {{"--layers", "0"}, "not '0'"},
      {{"--batch", "0"}, "not '0'"},
      {{"--ranks", "0"}, "not '0'"},
      {{"--steps", "0"}, "not '0'"},
      {{"--starts", "0"}, "not '0'"},
      {{"--optimizer", "lion"}, "lion"},
      {{"--bucket-cap-mb", "0"}, "\"0\" is no bucket cap"},
      {{"--bucket-cap-mb", "25M"}, "\"25M\" is no bucket cap"},
      {{"--csv", folder / "no-such/rows.csv"}, "cannot write"},
      {{"--peers"}, "needs Python's PyTorch: let DDPKIT_PEER_PYTHON name"},
      {{"more"}, "more"},
  };
  for (const auto& [options, message] : wrong) {
    CAPTURE(options);
    std::vector<std::string> arguments = {"step"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    const Run run = run_bench(folder, arguments, {{"DDPKIT_PEER_PYTHON", ""}});
    CHECK(run.exit_code == 2);
    CHECK_THAT(run.errors, ContainsSubstring(message));
    CHECK(std::count(run.errors.begin(), run.errors.end(), '\n') == 1);
    CHECK(run.lines.empty());
  }
  const Run run = run_bench(folder, {"step", "--peers"}, {{"DDPKIT_PEER_PYTHON", "/no/such/python"}});
  CHECK(run.exit_code == 2);
  CHECK_THAT(run.errors, ContainsSubstring("DDPKIT_PEER_PYTHON is /no/such/python, which is no program"));
  CHECK(names_in(folder.path()).empty());
}

RANK_TEST("bench step counts weights that differ between ranks in any bit", "[bench]", 2, 3) {
  const auto fresh = [] { return std::vector<at::Tensor>{torch::zeros({3, 5}), torch::ones({7}).requires_grad_()}; };
  CHECK(count_wrong_weights(fresh(), group) == 0);
  auto weights = fresh();
  const torch::NoGradGuard no_grad;
  if (group.rank() == 1) {
    weights[0][2][4] = -0.0;
    weights[1][0] = std::nextafter(1.0f, 2.0f);
  }
  CHECK(count_wrong_weights(weights, group) == (group.rank() == 1 ? 2 : 0));
  weights = fresh();
  weights[1][3] = std::numeric_limits<float>::infinity();
  CHECK(count_wrong_weights(weights, group) == 1);
}

TEST_CASE("ddpkit bench step measures each way to update", "[bench]") {
  const Folder folder;
  const MeasuredSteps measured =
      measure_steps(folder, {"--model", "mlp-1m", "--backend", "shm", "--steps", "4", "--optimizer", "adamw"});
  std::map<std::string, std::map<std::string, std::string>> rows;
  for (const auto& row : measured.rows) rows[row.at("system")] = row;
  CHECK(rows.size() == 8);
  for (const std::string system : {"alone", "alone-barrier", "alone-fused", "ddpkit-shm", "ddpkit-shm-fused",
                                   "ddpkit-shm-sharded", "ddpkit-shm-in-backward"}) {
    CAPTURE(system);
    REQUIRE(rows.contains(system));
    CHECK(rows[system]["wrong"] == "0");
  }
#ifndef __SANITIZE_ADDRESS__  // AddressSanitizer delays frees.
  // Weights and optimizer state exist once, not once per rank.
  CHECK(std::stoull(rows["ddpkit-shm-in-backward"]["memory_bytes"]) <
        std::stoull(rows["ddpkit-shm-fused"]["memory_bytes"]));
#endif
}

TEST_CASE("ddpkit bench step measures sharded weights and layers that run again", "[bench]") {
  const Folder folder;
  const MeasuredSteps measured =
      measure_steps(folder, {"--model", "mlp-10k,transformer", "--backend", "shm", "--steps", "4", "--optimizer",
                             "adamw", "--update", "fsdp", "--bucket-cap-mb", "1,4", "--activation-checkpoint"});
  const auto of_system = [&](const std::string& system) {
    std::map<std::string, std::map<std::string, std::string>> rows;
    for (const auto& row : measured.rows)
      if (row.at("system") == system) CHECK(rows.emplace(row.at("model"), row).second);
    return rows;
  };
  CHECK(of_system("ddpkit-shm-fsdp").size() == 2);
  CHECK(of_system("alone-checkpointed").size() == 1);  // An MLP has no such layers.
  for (const std::string system : {"ddpkit-shm-fsdp", "alone-checkpointed"}) {
    const auto row = of_system(system).at("transformer");
    CHECK(row.at("wrong") == "0");
    CHECK(row.at("params") == measured.rows.back().at("params"));
    CHECK(std::stod(row.at("us")) > 0);
  }
}

TEST_CASE("ddpkit bench step restarts its processes", "[bench]") {
  const Folder folder;
  const auto [run, rows] =
      measure_steps(folder, {"--model", "mlp-10k", "--backend", "shm", "--steps", "5", "--starts", "2"});
  CHECK_THAT(run.errors, ContainsSubstring("starting the ranks, 1 of 2 times") &&
                             ContainsSubstring("starting the ranks, 2 of 2 times") &&
                             ContainsSubstring("4 systems take turns in 2 rounds") &&
                             ContainsSubstring("4 systems take turns in 3 rounds"));
  REQUIRE(rows.size() == 4);
  CHECK(rows[0].at("ratio_to_alone") == "1.0000");
  CHECK(rows[3].at("system") == "ddpkit-shm");
  for (const auto& row : rows) {
    CHECK(std::stod(row.at("us")) > 0);
    CHECK(row.at("wrong") == "0");
  }
}

TEST_CASE("A step's models train", "[bench]") {
  for (const std::string name : {"mlp-16x2", "cnn", "lstm", "transformer", "transformer-25m"}) {
    CAPTURE(name);
    const StepTask task = make_step_task(name, 4, 0);
    const auto optimizer =
        make_step_optimizer("adamw", name == "cnn" ? kFusedUpdate : kTorchUpdate, task.model->parameters());
    const auto loss = [&] { return torch::cross_entropy_loss(task.model->forward(task.input), task.target); };
    const auto first = loss().item<double>();
    for (int step = 0; step < 20; ++step) {
      optimizer.zero_grad();
      loss().backward();
      optimizer.step();
    }
    CHECK(loss().item<double>() < first);
    // Another rank has the same weights and another batch.
    const StepTask other = make_step_task(name, 4, 1), same = make_step_task(name, 4, 0);
    CHECK(other.model->parameters()[0].equal(same.model->parameters()[0]));
    CHECK_FALSE(other.input.equal(same.input));
    const StepTask again = make_step_task(name, 4, 0, at::kCPU, /*checkpoint=*/true);
    for (const StepTask* one : {&same, &again})
      torch::cross_entropy_loss(one->model->forward(one->input), one->target).backward();
    CHECK(again.model->parameters()[0].grad().equal(same.model->parameters()[0].grad()));
  }
}

TEST_CASE("workers that end early, or lack their backend, are an error with the reason", "[bench]") {
  const auto workers = [](const std::string& script) {
    // The remaining arguments are $0, "--control", and the list.
    return Workers({.system = "system",
                    .command = {"sh", "-c", script, "sh"},
                    .ranks = 2,
                    .answer_prefix = "answer: ",
                    .no_backend_prefix = "lacks: "});
  };
  // Not 9<&N: dash accepts only one digit for N.
  const std::string ready = "exec 9</dev/fd/$(echo $2 | cut -d, -f$((RANK + 1))); echo 'answer: ready'; ";
  {
    Workers echo({.system = "system",
                  .command = {"sh", "-c", ready + "while read line <&9; do echo \"answer: $RANK $line\"; done", "sh"},
                  .ranks = 2,
                  .answer_prefix = "answer: ",
                  .no_backend_prefix = "lacks: "});
    CHECK(echo.ask_all("a b") == std::vector<std::string>{"answer: 0 a b", "answer: 1 a b"});
    CHECK(echo.ask("c", 1, 1) == std::vector<std::string>{"answer: 1 c"});
  }
  CHECK_THROWS_WITH(workers("exit 3"), ContainsSubstring("exited with code 3"));
  CHECK_THROWS_WITH(workers("echo lacks: a card; exit 77"), ContainsSubstring("a card"));
  Workers dies({.system = "system",
                .command = {"sh", "-c", ready + "read line <&9; [ $RANK = 0 ] && kill -9 $$; read line <&9", "sh"},
                .ranks = 2,
                .answer_prefix = "answer: ",
                .no_backend_prefix = "lacks: "});
  try {
    dies.ask_all("go");
    FAIL("no error");
  } catch (const WorkerFailed& error) {
    CHECK_THAT(error.what(), ContainsSubstring("system: rank 0 was killed by signal 9"));
    CHECK(error.exit_code() == 137);
  }
}

TEST_CASE("ddpkit bench measures on a GPU", "[bench][gpu]") {
  NEEDS_GPU();
  const Folder folder;
  const auto rows =
      measure_steps(folder, {"--device", "cuda", "-n", "1", "--model", "mlp-10k,transformer", "--steps", "4"}).rows;
  const std::vector<std::string> systems = {"alone",       "alone-fused",       "alone-graphed",
                                            "ddpkit-nccl", "ddpkit-nccl-fused", "ddpkit-nccl-graphed"};
  REQUIRE(rows.size() == 2 * systems.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    CHECK(rows[i].at("system") == systems[i % systems.size()]);
    CHECK(std::stod(rows[i].at("us")) > 0);
    CHECK(std::stoull(rows[i].at("memory_bytes")) >= 4 * std::stoull(rows[i].at("params")));
    CHECK(rows[i].at("wrong") == "0");
  }
  const Run calls = run_bench(folder, {"collectives", "--device", "cuda", "-n", "1", "-e", "64K", "--iters", "5"});
  INFO(calls.errors);
  CHECK(calls.exit_code == 0);
}
