#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <sstream>

#include <ddpkit/comm/local_launch.h>
#include <ddpkit/train/checkpoint.h>

#include "har/generate.h"
#include "har/model.h"
#include "support/catch.h"
#include "support/folder.h"

using ddpkit::testing::Folder;
using ddpkit::testing::names_in;
using ddpkit::testing::read_file;
using ddpkit::testing::write_file;

namespace {

struct Run {
  int exit_code = -1;
  std::vector<std::string> lines;  // Of rank 0's stdout.
  std::string errors;              // Everyone's stderr, and the other ranks' stdout.

  const std::string& last_line() const { return lines.back(); }
  double accuracy() const {
    const std::string start = "test accuracy ";
    REQUIRE_FALSE(lines.empty());
    REQUIRE(last_line().starts_with(start));
    REQUIRE(last_line().ends_with(" %"));
    return std::stod(last_line().substr(start.size()));
  }
};

Run run_har(int ranks, std::vector<std::string> arguments) {
  const Folder folder;
  std::vector<std::string> command = {
      "sh", "-c", R"(exec "$0" "$@" 2> ")" + (folder / "errors").string() + R"(-$RANK")", DDPKIT_TEST_HAR};
  command.insert(command.end(), arguments.begin(), arguments.end());
  std::string output;
  Run run;
  const ddpkit::LocalLaunchResult result = ddpkit::local_launch(
      {.command = command,
       .ranks = ranks,
       .environment = {{"OMP_NUM_THREADS", "1"}},
       .time_limit = std::chrono::seconds(200),
       .on_output = [&](int rank, const std::string& text) { (rank == 0 ? output : run.errors) += text; }});
  REQUIRE_FALSE(result.timed_out);
  run.exit_code = result.exit_code();
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) run.lines.push_back(line);
  for (int rank = 0; rank < ranks; ++rank) run.errors += read_file(folder / ("errors-" + std::to_string(rank)));
  return run;
}

// One data set for all tests of this process.
const std::string& generated() {
  static const Folder folder;
  static const std::string path = [] {
    har::generate_ucihar(folder / "set", {.train = 120, .test = 61, .steps = 64});
    return (folder / "set").string();
  }();
  return path;
}

// The weights and statistics in a run's checkpoint.
std::vector<at::Tensor> weights_of(const Folder& save_dir) {
  const auto model = har::make_model({.mode = har::Mode::kCnn, .channels = 9, .steps = 64, .classes = 6});
  torch::optim::AdamW optimizer(model->parameters());
  ddpkit::train::read_checkpoint(save_dir / "checkpoint.pt", *model, optimizer);
  std::vector<at::Tensor> tensors = model->parameters();
  for (const at::Tensor& buffer : model->buffers()) tensors.push_back(buffer);
  return tensors;
}

bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) { return x.equal(y); });
}

// Fails with `code` and says one sentence, once.
void check_refused(const std::vector<std::string>& arguments, int code, const std::string& message) {
  for (const int ranks : {1, 2}) {
    CAPTURE(arguments, ranks);
    const Run run = run_har(ranks, arguments);
    CHECK(run.exit_code == code);
    CHECK_THAT(run.errors, ContainsSubstring(message));
    CHECK(std::count(run.errors.begin(), run.errors.end(), '\n') == 1);
    CHECK(run.lines.empty());
  }
}

}  // namespace

TEST_CASE("har learns a generated set, alone and on several ranks", "[har]") {
  for (const int ranks : {1, 2, 4}) {
    CAPTURE(ranks);
    const Run run = run_har(ranks, {"--data", generated(), "--epochs", "20"});
    INFO(run.errors);
    REQUIRE(run.exit_code == 0);
    CHECK(run.accuracy() >= 95);
    CHECK(std::count_if(run.lines.begin(), run.lines.end(), [](const auto& x) { return x.starts_with("epoch "); }) ==
          20);
    CHECK(run.errors.empty());
  }
}

TEST_CASE("har reaches 95 % on BasicMotions whatever the seed and the number of ranks", "[har]") {
  const char* given = std::getenv("DDPKIT_BASIC_MOTIONS");
  const std::string data = given ? given : DDPKIT_TEST_DATA "/basic-motions";
  if (!std::filesystem::exists(data)) DDPKIT_SKIP("BasicMotions is not here: script/data basic-motions fetches it");
  for (const int ranks : {1, 2, 4}) {
    for (const char* seed : {"0", "1", "2", "3", "4"}) {
      CAPTURE(ranks, seed);
      const Run run = run_har(ranks, {"--data", data, "--seed", seed});
      INFO(run.errors);
      REQUIRE(run.exit_code == 0);
      CHECK(run.accuracy() >= 95);
    }
  }
}

TEST_CASE("har's other models learn as well", "[har]") {
  for (const char* mode : {"lstm", "flatten"}) {
    CAPTURE(mode);
    const Run run = run_har(2, {"--data", generated(), "--mode", mode, "--epochs", "12", "--lr", "5e-3"});
    INFO(run.errors);
    REQUIRE(run.exit_code == 0);
    CHECK(run.accuracy() >= 60);  // Of six classes; they are no match for the cnn on so few windows.
  }
}

TEST_CASE("har --json prints a line an epoch that a program can read", "[har]") {
  const Run run = run_har(2, {"--data", generated(), "--epochs", "3", "--json"});
  REQUIRE(run.lines.size() == 4);
  for (int epoch = 1; epoch <= 3; ++epoch) {
    const auto line = nlohmann::json::parse(run.lines[static_cast<std::size_t>(epoch - 1)]);
    CHECK(line["epoch"] == epoch);
    CHECK(line["epochs"] == 3);
    CHECK(line["step"] == 4 * epoch);  // 120 windows, 16 on each of 2 ranks.
    CHECK(line["world_size"] == 2);
    CHECK(line["train_loss"].is_number());
    CHECK(line["samples_per_second"] > 0);
    // Of 61 test windows, each counted once although 61 is odd.
    const double correct = line["test_accuracy"].get<double>() * 61;
    CHECK(correct == Approx(std::round(correct)).epsilon(1e-12));
  }
  CHECK(run.accuracy() >= 0);
}

TEST_CASE("the same seed gives the same bits, another seed others", "[har]") {
  const Folder a;
  const Folder b;
  const Folder c;
  for (const auto& [folder, seed] : {std::pair{&a, "1"}, std::pair{&b, "1"}, std::pair{&c, "2"}}) {
    const Run run = run_har(2, {"--data", generated(), "--epochs", "2", "--seed", seed, "--save-dir", folder->path()});
    INFO(run.errors);
    REQUIRE(run.exit_code == 0);
    CHECK(names_in(folder->path()) == std::vector<std::string>{"checkpoint.pt"});
  }
  CHECK(same_bits(weights_of(a), weights_of(b)));
  CHECK_FALSE(same_bits(weights_of(a), weights_of(c)));
}

TEST_CASE("a run that was stopped and resumed ends with the weights of one that was not", "[har]") {
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    const Folder whole;
    const Folder parts;
    const std::vector<std::string> common = {"--data", generated(), "--epochs", "4", "--save-dir"};
    const auto with = [&](const Folder& folder, const std::vector<std::string>& more) {
      std::vector<std::string> arguments = common;
      arguments.push_back(folder.path());
      arguments.insert(arguments.end(), more.begin(), more.end());
      return arguments;
    };
    REQUIRE(run_har(ranks, with(whole, {})).exit_code == 0);
    // In the middle of the third epoch.
    REQUIRE(run_har(ranks, with(parts, {"--max-steps", ranks == 1 ? "18" : "9"})).exit_code == 0);
    CHECK(ddpkit::train::read_checkpoint_info(parts / "checkpoint.pt").epoch == 2);
    const Run resumed = run_har(ranks, with(parts, {"--resume", "--json"}));
    INFO(resumed.errors);
    REQUIRE(resumed.exit_code == 0);
    CHECK(resumed.lines.size() == 3);
    CHECK(same_bits(weights_of(whole), weights_of(parts)));
  }
}

TEST_CASE("another run's checkpoint is not replaced", "[har]") {
  const Folder folder;
  const std::string path = folder.path().string();
  REQUIRE(run_har(2, {"--data", generated(), "--epochs", "1", "--save-dir", path}).exit_code == 0);
  const std::string before = read_file(folder / "checkpoint.pt");
  check_refused({"--data", generated(), "--epochs", "1", "--lr", "0.5", "--save-dir", path}, 1,
                "already holds a run with");
  check_refused({"--data", generated(), "--epochs", "2", "--mode", "lstm", "--save-dir", path, "--resume"}, 1,
                "cannot resume");
  CHECK(read_file(folder / "checkpoint.pt") == before);
  CHECK(run_har(1, {"--data", generated(), "--epochs", "1", "--mode", "lstm", "--save-dir", path, "--overwrite"})
            .exit_code == 0);
  CHECK(read_file(folder / "checkpoint.pt") != before);
}

TEST_CASE("har takes its options from a YAML file", "[har]") {
  const Folder folder;
  write_file(folder / "run.yaml", "data: " + generated() + "\ntraining: {epochs: 1, batch-size: 40}\nmode: flatten\n");
  const Run run = run_har(1, {"--config", folder / "run.yaml", "--json"});
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  CHECK(nlohmann::json::parse(run.lines.front())["step"] == 3);
}

TEST_CASE("bad input is one sentence, an exit code, and nothing else", "[har]") {
  const Folder folder;
  check_refused({}, 2, "har: --data FOLDER is required");
  check_refused({"--data", "/nonexistent"}, 1, "har: there is no data folder /nonexistent");
  check_refused({"--data", folder.path()}, 1, "neither the UCI-HAR layout");
  check_refused({"--data", generated(), "--batch-size", "0"}, 2, "har: --batch-size: must be at least 1, not 0");
  check_refused({"--data", generated(), "--epoch", "3"}, 2, "unknown option --epoch; did you mean --epochs?");
  check_refused({"--data", generated(), "--mode", "transformer"}, 2, "--mode: must be one of cnn, flatten, lstm");
  check_refused({"--data", generated(), "--dropout", "1.5"}, 2, "--dropout");
  check_refused({"--data", generated(), "--save-dir", "/proc/none"}, 1, "cannot make the folder /proc/none");
  check_refused({"--data", generated(), "--config", "/nonexistent.yaml"}, 2, "/nonexistent.yaml");

  har::generate_ucihar(folder / "set", {.train = 6, .test = 6, .steps = 4});
  const auto file = folder / "set/train/Inertial Signals/total_acc_z_train.txt";
  const std::string good = read_file(file);
  std::string bad = good;
  bad[bad.find('\n') + 3] = 'x';
  write_file(file, bad);
  check_refused({"--data", folder / "set"}, 1, "total_acc_z_train.txt:2: ");
  write_file(file, good);
  write_file(folder / "set/test/y_test.txt", "");
  check_refused({"--data", folder / "set"}, 1, "y_test.txt is empty");
}

TEST_CASE("a loss that is no number ends the run before it replaces a checkpoint", "[har]") {
  const Folder folder;
  const Run run = run_har(2, {"--data", generated(), "--epochs", "1", "--lr", "1e30", "--save-dir", folder.path()});
  CHECK(run.exit_code == 1);
  CHECK_THAT(run.errors, ContainsSubstring("har: the loss became") && ContainsSubstring("lower --lr"));
  CHECK(std::count(run.errors.begin(), run.errors.end(), '\n') == 1);
  CHECK(names_in(folder.path()).empty());
}

TEST_CASE("a file that only one rank finds wrong ends them all", "[har]") {
  const Folder folder;
  write_file(folder / "wrapper",
             "#!/bin/sh\nif [ $RANK = 1 ]; then shift 2; set -- --data /gone \"$@\"; fi\nexec " DDPKIT_TEST_HAR
             " \"$@\"\n");
  std::string output;
  const auto result = ddpkit::local_launch(
      {.command = {"sh", folder / "wrapper", "--data", generated()},
       .ranks = 2,
       .time_limit = std::chrono::seconds(60),
       .stop_on_failure = false,
       .on_output = [&](int rank, const std::string& text) { output += std::to_string(rank) + ": " + text; }});
  CHECK_FALSE(result.timed_out);
  CHECK(output == "1: har: there is no data folder /gone\n");
  for (const auto& rank : result.ranks) CHECK(rank.exit_code == 1);
}
