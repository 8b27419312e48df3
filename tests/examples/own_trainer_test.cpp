// The example of a user's trainer: Run's promises hold for a loop that is not one of ours.
#include "support/program.h"

using ddpkit::testing::Arguments, ddpkit::testing::Folder, ddpkit::testing::joined, ddpkit::testing::names_in;

namespace {

ddpkit::testing::ProgramRun run_own_trainer(int ranks, const Arguments& arguments) {
  const auto run = ddpkit::testing::run_program(DDPKIT_TEST_OWN_TRAINER, ranks, arguments);
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  CHECK(run.errors.empty());
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
