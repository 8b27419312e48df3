#include "har_program.h"

using namespace har::testing;

TEST_CASE("har learns a generated set, alone and on several ranks", "[har]") {
  for (const int ranks : {1, 2, 4}) {
    CAPTURE(ranks);
    const Run run = run_har(ranks, {"--data", generated(), "--epochs", "20"});
    INFO(run.errors);
    REQUIRE(run.exit_code == 0);
    CHECK(run.accuracy() >= 95);
    CHECK(std::count_if(run.lines.begin(), run.lines.end(), [](const auto& x) { return x.starts_with("Epoch "); }) ==
          20);
    CHECK(run.errors.empty());
  }
}

namespace {

void check_basic_motions(const std::vector<int>& worlds, const std::vector<const char*>& seeds) {
  const char* given = std::getenv("DDPKIT_BASIC_MOTIONS");
  const std::string data = given ? given : DDPKIT_TEST_DATA "/basic-motions";
  if (!std::filesystem::exists(data)) DDPKIT_SKIP("BasicMotions is not here: script/data basic-motions fetches it");
  for (const int ranks : worlds) {
    for (const char* seed : seeds) {
      CAPTURE(ranks, seed);
      const Run run = run_har(ranks, {"--data", data, "--epochs", "30", "--seed", seed});
      INFO(run.errors);
      REQUIRE(run.exit_code == 0);
      CHECK(run.accuracy() >= 95);
    }
  }
}

}  // namespace

TEST_CASE("har reaches 95 % on BasicMotions", "[har]") { check_basic_motions({1, 2}, {"0"}); }

TEST_CASE("har reaches 95 % on BasicMotions whatever the seed and the number of ranks", "[har][.long]") {
  check_basic_motions({1, 2, 4}, {"0", "1", "2", "3", "4"});
}

TEST_CASE("har's other models learn as well", "[har]") {
  for (const char* mode : {"lstm", "flatten"}) {
    CAPTURE(mode);
    const Run run = run_har(2, {"--data", generated(), "--mode", mode, "--epochs", "12", "--lr", "5e-3"});
    INFO(run.errors);
    REQUIRE(run.exit_code == 0);
    CHECK(run.accuracy() >= 60);  // Percent, of six classes. On so few windows these models reach less than the cnn.
  }
}

TEST_CASE("har --json prints one JSON line per epoch", "[har]") {
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
    // 61 test windows, each counted once although 61 is odd.
    const double correct = line["test_accuracy"].get<double>() * 61;
    CHECK(correct == Approx(std::round(correct)).epsilon(1e-12));
    std::int64_t counted = 0, right = 0;
    for (std::size_t target = 0; target < 6; ++target) {
      for (std::size_t predicted = 0; predicted < 6; ++predicted) {
        const auto count = line["test_confusion"][target][predicted].get<std::int64_t>();
        counted += count;
        right += target == predicted ? count : 0;
      }
    }
    CHECK(counted == 61);
    CHECK(static_cast<double>(right) == Approx(correct));
    CHECK(line["test_f1"].size() == 6);
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
    CHECK(names_in(folder->path()) == std::vector<std::string>{"checkpoint.pt", "config.yaml", "confusion.svg",
                                                               "curves.svg", "logs", "metrics.csv"});
  }
  CHECK(same_bits(weights_of(a), weights_of(b)));
  CHECK_FALSE(same_bits(weights_of(a), weights_of(c)));
}

TEST_CASE("har takes its options from a YAML file", "[har]") {
  const Folder folder;
  write_file(folder / "run.yaml", "data: " + generated() + "\ntraining: {epochs: 1, batch-size: 40}\nmode: flatten\n");
  const Run run = run_har(1, {"--config", folder / "run.yaml", "--json"});
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  CHECK(nlohmann::json::parse(run.lines.front())["step"] == 3);
}

TEST_CASE("bad input gives one sentence and an exit code, and nothing else", "[har]") {
  const Folder folder;
  check_refused({"--lr", "-1"}, 2, "har: --lr must be a number above 0", {1, 2});
  check_refused({"--data", "/nonexistent"}, 1, "har: there is no data folder /nonexistent", {2});
  check_refused({"--data", folder.path()}, 1, "neither the UCI-HAR layout");
  check_refused({"--data", generated(), "--batch-size", "0"}, 2,
                "har: --batch-size must be a whole number from 1 to 2147483647, not '0'");
  check_refused({"--data", generated(), "--epoch", "3"}, 2, "unknown option --epoch; did you mean --epochs?");
  check_refused({"--data", generated(), "--mode", "transformer"}, 2, "--mode must be one of cnn, flatten, lstm");
  check_refused({"--data", generated(), "--dropout", "1.5"}, 2, "--dropout must be a number from 0 to 0.95, not '1.5'");
  check_refused({"--data", generated(), "--momentum", "nan"}, 2, "--momentum must be a number from 0 to 1, not 'nan'");
  check_refused({"--data", generated(), "--gpu-ids=-1"}, 2,
                "--gpu-ids must be a list, each a whole number from 0 to 1023, not '-1'");
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

TEST_CASE("generating data does not change other files", "[har]") {
  const Folder folder;
  write_file(folder / "set.partial/mine", "x");
  har::generate_ucihar(folder / "set", {.train = 6, .test = 6, .steps = 4});
  CHECK(read_file(folder / "set.partial/mine") == "x");
  CHECK(names_in(folder.path()) == std::vector<std::string>{"set", "set.partial"});
  CHECK(names_in(folder / "set") == std::vector<std::string>{"activity_labels.txt", "test", "train"});
  std::filesystem::create_directory(folder / "plain");
  CHECK(std::filesystem::status(folder / "set").permissions() ==
        std::filesystem::status(folder / "plain").permissions());
  // A failure leaves no files.
  CHECK_THROWS_WITH(har::generate_ucihar(folder / "set.partial/mine/set", {.train = 6, .test = 6, .steps = 4}),
                    ContainsSubstring("cannot write "));
  CHECK(names_in(folder / "set.partial") == std::vector<std::string>{"mine"});
}

TEST_CASE("har trains on data whose name is no UTF-8", "[har]") {
  const Folder folder;
  const std::filesystem::path data = folder / "caf\xe9";
  std::filesystem::copy(generated(), data, std::filesystem::copy_options::recursive);
  for (const char* epochs : {"1", "2"}) {
    const Run run = run_har(1, {"--data", data, "--epochs", epochs, "--save-dir", folder / "run"});
    INFO(run.errors);
    CHECK(run.exit_code == 0);
  }
  CHECK(ddpkit::train::read_checkpoint_info(folder / "run/checkpoint.pt").epoch == 2);
}

TEST_CASE("a loss that is no number ends the run before it replaces a checkpoint", "[har]") {
  const Folder folder;
  const Run run = run_har(2, {"--data", generated(), "--epochs", "1", "--lr", "1e30", "--save-dir", folder.path()});
  CHECK(run.exit_code == 1);
  CHECK_THAT(run.errors, ContainsSubstring("har: the loss became") && ContainsSubstring("lower --lr"));
  CHECK(std::count(run.errors.begin(), run.errors.end(), '\n') == 1);
  CHECK(names_in(folder.path()) == std::vector<std::string>{"config.yaml", "logs"});
}

TEST_CASE("a file that only one rank finds wrong ends them all", "[har]") {
  const Folder folder;
  write_file(folder / "wrapper",
             "#!/bin/sh\nif [ $RANK = 1 ]; then shift 2; set -- --data /gone \"$@\"; fi\nexec " DDPKIT_TEST_HAR
             " \"$@\"\n");
  std::string output;
  const auto result = ddpkit::launch(
      {.command = {"sh", folder / "wrapper", "--data", generated(), "--json"},
       .ranks = 2,
       .time_limit = std::chrono::seconds(60),
       .stop_on_failure = false,
       .on_output = [&](int rank, const std::string& text) { output += std::to_string(rank) + ": " + text; }});
  CHECK_FALSE(result.timed_out);
  CHECK(output == "1: har: there is no data folder /gone\n");
  for (const auto& rank : result.ranks) CHECK(rank.exit_code == 1);
}
