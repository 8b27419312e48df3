// Runs that end early and resume.
#include <algorithm>
#include <chrono>
#include <cmath>

#include "har_program.h"

using namespace har::testing;

namespace {

// Writes two channels of 20 steps in three classes.
void write_ts(const std::filesystem::path& folder) {
  for (const auto& [split, cases] : {std::pair{"TRAIN", 90}, std::pair{"TEST", 31}}) {
    std::string text = "@problemName Waves\n@univariate false\n@classLabel true slow middle fast\n@data\n";
    for (int i = 0; i < cases; ++i) {
      for (int channel = 0; channel < 2; ++channel) {
        for (int step = 0; step < 20; ++step)
          text += fmt::format("{}{:.4f}", step == 0 ? "" : ",", std::sin(0.3 * (1 + i % 3) * step + i + channel));
        text += ":";
      }
      text += std::array{"slow", "middle", "fast"}[static_cast<std::size_t>(i % 3)] + std::string("\n");
    }
    write_file(folder / fmt::format("Waves_{}.ts", split), text);
  }
}

}  // namespace

TEST_CASE("a run that was stopped and resumed ends with the weights of one that was not", "[har]") {
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    const Folder whole;
    const Folder parts;
    const Arguments common = {"--data", generated(), "--epochs", "4", "--save-dir"};
    const auto with = [&](const Folder& folder, const Arguments& more) {
      return joined(joined(common, {folder.path()}), more);
    };
    REQUIRE(run_har(ranks, with(whole, {})).exit_code == 0);
    // In the middle of the third epoch.
    REQUIRE(run_har(ranks, with(parts, {"--max-steps", ranks == 1 ? "18" : "9"})).exit_code == 0);
    CHECK(ddpkit::train::read_checkpoint_info(parts / "checkpoint.pt").epoch == 2);
    const Run resumed = run_har(ranks, with(parts, {"--json"}));
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
                "already holds a run with lr 0.001");
  check_refused({"--data", generated(), "--epochs", "2", "--mode", "lstm", "--save-dir", path, "--resume"}, 1,
                "cannot resume");
  CHECK(read_file(folder / "checkpoint.pt") == before);
  CHECK(run_har(1, {"--data", generated(), "--epochs", "1", "--mode", "lstm", "--save-dir", path, "--overwrite"})
            .exit_code == 0);
  CHECK(read_file(folder / "checkpoint.pt") != before);
}

TEST_CASE("a run killed anywhere and started again ends with the weights of one never killed", "[har]") {
  const Folder ts;
  write_ts(ts.path());
  for (const std::string& data : {generated(), ts.path().string()}) {
    for (const int ranks : {1, 2}) {
      CAPTURE(data, ranks);
      const Folder whole, killed;
      const auto arguments = [&](const Folder& folder) {
        return Arguments{"--data", data, "--epochs", "12", "--save-dir", folder.path()};
      };
      const Run undisturbed = run_har(ranks, arguments(whole));
      REQUIRE(undisturbed.exit_code == 0);
      const auto runs = run_until_not_killed(ranks, undisturbed,
                                             [&](const Kill& kill) { return run_har(ranks, arguments(killed), kill); });
      CHECK(runs.kills > 0);
      const har::ModelOptions model = data == generated() ? har::ModelOptions{.channels = 9, .steps = 64, .classes = 6}
                                                          : har::ModelOptions{.channels = 2, .steps = 20, .classes = 3};
      CHECK(same_bits(weights_of(whole, model), weights_of(killed, model)));
    }
  }
}

TEST_CASE("a run killed within an epoch resumes within it, to the same bits", "[har]") {
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    const Folder whole, killed;
    const auto arguments = [&](const Folder& folder) {
      return Arguments{"--data",
                       generated(),
                       "--epochs",
                       "6",
                       "--batch-size",
                       "5",
                       "--dropout",
                       "0.3",
                       "--json",
                       "--save-dir",
                       folder.path(),
                       "--grad-accum-steps",
                       "2",
                       "--checkpoint-steps",
                       "1",
                       "--keep-checkpoints",
                       "2"};
    };
    const Run undisturbed = run_har(ranks, arguments(whole));
    REQUIRE(undisturbed.exit_code == 0);
    bool was_within = false;
    const auto runs = run_until_not_killed(
        ranks, undisturbed, [&](const Kill& kill) { return run_har(ranks, arguments(killed), kill); },
        [&] { was_within = was_within || is_within_epoch(killed / "checkpoint.pt", 120 / ranks / 10); },
        killed / "checkpoint.pt");
    CHECK(was_within);
    CHECK(same_bits(weights_of(whole), weights_of(killed)));
    const auto last_epoch = [](const ddpkit::testing::ProgramRun& run) {
      auto json = nlohmann::json::parse(run.lines.at(run.lines.size() - 2));
      for (const char* key : {"seconds", "samples_per_second", "peak_memory_bytes"}) json.erase(key);
      return json;
    };
    // If the last kill came after the last checkpoint, no epoch remained to report.
    if (runs.last.lines.size() > 1) CHECK(last_epoch(runs.last) == last_epoch(undisturbed));
  }
}

TEST_CASE("another number of ranks resumes from the same sample", "[har]") {
  const Folder folder;
  const auto arguments = [&](const Arguments& more) {
    return joined({"--data", generated(), "--epochs", "1", "--batch-size", "4", "--json", "--save-dir", folder.path(),
                   "--checkpoint-steps", "1"},
                  more);
  };
  REQUIRE(run_har(2, arguments({"--max-steps", "5"})).exit_code == 0);
  CHECK(ddpkit::train::read_checkpoint_info(folder / "checkpoint.pt").step == 5);
  const Run rest = run_har(1, arguments({}));
  INFO(rest.errors);
  REQUIRE(rest.exit_code == 0);
  // 120 windows: 5 steps of 2 x 4 were taken; 80 windows remain, in steps of 4.
  CHECK(rest.json(0)["step"] == 5 + 20);
}

TEST_CASE("another number of ranks resumes with the learning rate for its fraction of the run", "[har]") {
  const auto arguments = [](const Folder& folder, const Arguments& more) {
    return joined(
        {"--data", generated(), "--epochs", "6", "--json", "--checkpoint-steps", "1", "--save-dir", folder.path()},
        more);
  };
  for (const auto& [before, after] : {std::pair{1, 3}, std::pair{3, 1}}) {
    CAPTURE(before, after);
    const Folder whole, parts;
    const Run undisturbed = run_har(after, arguments(whole, {}));
    REQUIRE(undisturbed.exit_code == 0);
    // Within the third epoch: 120 windows make 8 updates on one rank, 3 on three.
    const int steps = before == 1 ? 18 : 7;
    REQUIRE(run_har(before, arguments(parts, {"--max-steps", std::to_string(steps)})).exit_code == 0);
    CHECK(ddpkit::train::read_checkpoint_info(parts / "checkpoint.pt").step == steps);
    const Run rest = run_har(after, arguments(parts, {}));
    INFO(rest.errors);
    REQUIRE(rest.exit_code == 0);
    REQUIRE(rest.lines.size() == 5);
    for (std::size_t epoch = 2; epoch < 6; ++epoch) {
      CHECK(rest.json(epoch - 2)["epoch"] == epoch + 1);
      CHECK(rest.json(epoch - 2)["lr"] == undisturbed.json(epoch)["lr"]);
      CHECK(rest.json(epoch - 2)["lr"] > 0);
    }
  }
}

TEST_CASE("a run that a launcher restarts overwrites none of its files", "[har]") {
  const Folder folder;
  const std::string data = generated(), out = folder / "out";
  REQUIRE(run_har(2, {"--data", data, "--epochs", "1", "--lr", "0.5", "--save-dir", out}).exit_code == 0);
  const auto attempt = [&](int number, const std::string& epochs) {
    std::string lines;
    const auto result = ddpkit::launch(
        {.command = {DDPKIT_TEST_HAR, "--data", data, "--epochs", epochs, "--json", "--save-dir", out, "--overwrite"},
         .ranks = 2,
         .restart_count = number,
         .max_restarts = 1,
         .environment = {{"OMP_NUM_THREADS", "1"}},
         .time_limit = std::chrono::seconds(200),
         .on_output = [&](int, const std::string& text) { lines += text; }});
    INFO(lines);
    CHECK(result.exit_code() == 0);
    return std::count(lines.begin(), lines.end(), '{');
  };
  CHECK(attempt(0, "2") == 2);
  CHECK(attempt(1, "5") == 3);
  CHECK(ddpkit::train::read_checkpoint_info(folder / "out/checkpoint.pt").epoch == 5);
}
