// The example of a user's trainer: Run's promises hold for a loop that is not one of ours.
#include "support/program.h"

using ddpkit::testing::Arguments, ddpkit::testing::Folder, ddpkit::testing::joined, ddpkit::testing::names_in;

namespace {

ddpkit::testing::ProgramRun run_own_trainer(int ranks, const Arguments& arguments) {
  const auto run = ddpkit::testing::run_program(DDPKIT_TEST_OWN_TRAINER, ranks, arguments);
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  // A program that starts its ranks prints one banner.
  const std::string line = std::string(42, '=') + "\n";
  CHECK(run.errors == (ranks > 0 ? ""
                                 : line + "Multi-GPU Training Launcher\n" + line +
                                       "Number of ranks: 2 (CPU)\nLaunching distributed training...\n"));
  return run;
}

}  // namespace

TEST_CASE("own_trainer learns, draws its curves, and resumes within an epoch to the same result", "[own_trainer]") {
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    const Folder whole, parts;
    const auto with = [](const Folder& folder, const Arguments& more) {
      return joined({"--save-dir", folder.path(), "--save-steps", "1", "--json"}, more);
    };
    const auto undisturbed = run_own_trainer(ranks, with(whole, {}));
    REQUIRE(undisturbed.lines.size() == 11);
    CHECK(undisturbed.json(9)["train_loss"].get<double>() < 0.6 * undisturbed.json(0)["train_loss"].get<double>());
    CHECK(names_in(whole.path()) ==
          std::vector<std::string>{"checkpoint.pt", "config.yaml", "curves.svg", "logs", "metrics.csv"});
    run_own_trainer(ranks, with(parts, {"--max-steps", "40"}));
    CHECK(ddpkit::testing::is_within_epoch(parts / "checkpoint.pt", 32 / ranks));
    const auto resumed = run_own_trainer(ranks, with(parts, {"--resume"}));
    // The last epoch depends on all weights and on the order of the points.
    CHECK(resumed.json(resumed.lines.size() - 2)["train_loss"] == undisturbed.json(9)["train_loss"]);
  }
}

TEST_CASE("own_trainer has the options and the console of the trainers", "[own_trainer]") {
  const auto run = run_own_trainer(0, {"--epochs", "2", "--width", "8", "--nproc-per-node", "2"});
  CHECK(run.lines.front() == "Distributed training: 2 CPU rank(s)");
  CHECK(std::count_if(run.lines.begin(), run.lines.end(), ddpkit::testing::is_report) == 2);
  CHECK(std::count(run.lines.begin(), run.lines.end(),
                   "Files: checkpoints/own_trainer/run-1/{checkpoint.pt, config.yaml, curves.svg, logs/, "
                   "metrics.csv}") == 1);
  CHECK(run.lines.back() == "32 updates");
}

TEST_CASE("--profile prints the phases of 20 updates and writes a timeline that ddpkit estimate reads",
          "[own_trainer]") {
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    const Folder folder;
    const auto run = run_own_trainer(ranks, {"--save-dir", folder.path(), "--profile"});
    const auto head = std::find_if(run.lines.begin(), run.lines.end(),
                                   [](const std::string& line) { return line.starts_with("profile: 20 updates "); });
    REQUIRE(run.lines.end() - head > 6);
    const std::vector<std::string> names = {"data", "forward", "backward", "exposed exchange", "update", "total"};
    double sum = 0, percent = 0;
    for (std::size_t i = 0; i < names.size(); ++i) {
      const std::string& line = *(head + 1 + static_cast<std::ptrdiff_t>(i));
      CAPTURE(line);
      REQUIRE(line.starts_with(names[i] + " "));
      std::istringstream numbers(line.substr(names[i].size()));
      double ms = 0, share = 0;
      REQUIRE(numbers >> ms >> share);
      CHECK(ms > 0);
      if (names[i] == "total") {
        CHECK(sum == Approx(ms).margin(0.003));  // Each row is rounded.
        CHECK(percent == Approx(100).margin(0.3));
      }
      sum += ms;
      percent += share;
    }
    const auto trace = nlohmann::json::parse(ddpkit::testing::read_file(folder / "trace.json"));
    for (int rank = 0; rank < ranks; ++rank) {
      const auto& events = trace.at("traceEvents");
      for (const char* name : {"step", "forward", "backward", "update"}) {
        CAPTURE(rank, name);
        CHECK(std::count_if(events.begin(), events.end(), [&](const auto& event) {
                return event.at("name") == name && event.at("pid") == rank;
              }) == 20);
      }
    }
    const auto estimate = ddpkit::testing::run_program(
        DDPKIT_TEST_DDPKIT, 0, {"estimate", "--profile", folder / "trace.json", "--cluster", "a100"});
    INFO(estimate.errors);
    CHECK(estimate.exit_code == 0);
  }
}

TEST_CASE("--profile of a short run records fewer updates, or none", "[own_trainer]") {
  const auto short_run = run_own_trainer(1, {"--profile", "--max-steps", "4"});
  CHECK(std::count(short_run.lines.begin(), short_run.lines.end(),
                   "no profile: the run has made 4 updates, and --profile records updates 11 to 30") == 1);
  const auto part = run_own_trainer(2, {"--profile", "--max-steps", "14"});
  CHECK(std::any_of(part.lines.begin(), part.lines.end(),
                    [](const std::string& line) { return line.starts_with("profile: 4 updates "); }));
}
