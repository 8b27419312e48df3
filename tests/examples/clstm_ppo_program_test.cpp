// The program trains, reports errors, and resumes.
#include "clstm_ppo_program.h"

using namespace clstm_ppo::testing;

namespace {

Arguments with(const Arguments& more) { return joined(quick(), more); }

}  // namespace

TEST_CASE("clstm_ppo: a round is a line of JSON, and the unseen days come last", "[clstm_ppo]") {
  for (const int ranks : {0, 2}) {
    const Folder folder;
    const int episodes = 8 * std::max(ranks, 1) * 3 - 1;  // The last round is complete nevertheless.
    const Run run = run_clstm_ppo(
        ranks, with({"--num_episodes", std::to_string(episodes), "--save_dir", folder.path(), "--evaluate-every=2"}));
    INFO(run.errors);
    REQUIRE(run.exit_code == 0);
    REQUIRE(run.lines.size() == 5);
    for (std::size_t round = 0; round < 3; ++round) {
      const nlohmann::json line = run.json(round);
      CHECK(line["round"] == round + 1);
      CHECK(line["rounds"] == 3);
      CHECK(line["world_size"] == std::max(ranks, 1));
      CHECK(line["episodes"] == 8 * std::max(ranks, 1) * (static_cast<int>(round) + 1));
      CHECK(line["step"] == 6 * (round + 1));
      CHECK(line.contains("test_return") == (round == 1));
    }
    const nlohmann::json test = run.json(3)["test"];
    for (const char* name : {"policy", "buy_and_hold", "best_with_the_pattern"})
      for (const char* figure : {"return", "sharpe", "max_drawdown"}) CHECK(test[name][figure].is_number());
    CHECK(test["best_with_the_pattern"]["return"] > 0.2);
    CHECK(run.lines[4] == fmt::format("test return {:+.1f} %", 100 * test["policy"]["return"].get<double>()));
    CHECK(names_in(folder.path()) ==
          std::vector<std::string>{"checkpoint.pt", "config.yaml", "curves.svg", "equity.svg", "logs", "metrics.csv"});
    const std::string plot = read_file(folder / "equity.svg");
    CHECK(plot.starts_with("<svg"));
    CHECK(plot.ends_with("</svg>\n"));
    CHECK(std::count(plot.begin(), plot.end(), '\n') > 10);
  }
}

TEST_CASE("clstm_ppo: --profile records 20 updates of several rounds", "[clstm_ppo]") {
  const Folder folder;
  Arguments text = quick();
  REQUIRE(text.back() == "--json");
  text.pop_back();
  const Run run = run_clstm_ppo(2, joined(text, {"--num_episodes", "96", "--save_dir", folder.path(), "--profile"}));
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  CHECK(std::any_of(run.lines.begin(), run.lines.end(),
                    [](const std::string& line) { return line.starts_with("profile: 20 updates "); }));
  const std::string trace = read_file(folder / "trace.json");
  int steps = 0;
  for (std::size_t at = 0; (at = trace.find("\"name\":\"step\"", at)) != std::string::npos; ++at) ++steps;
  CHECK(steps == 2 * 20);
}

TEST_CASE("clstm_ppo: wrong options and wrong prices are named in one sentence", "[clstm_ppo]") {
  const Folder folder;
  const std::string header = "Date,Open,High,Low,Close,Volume\n", row = "2024-01-02,1,1,1,1,1\n";
  const auto with_prices = [&](const std::string& name, const std::string& text) {
    write_file(folder / name / "X.csv", text);
    return Arguments{"--data", folder / name};
  };
  check_refused({"--lr", "-1"}, 2, "--lr must be a number above 0", {1, 2});
  check_refused({"--data", "/nowhere"}, 1, "there is no folder /nowhere", {2});
  write_file(folder / "GOOG.csv", header + row);
  check_refused({"--data", folder / "GOOG.csv"}, 1, "GOOG.csv is not a folder: name its folder", {1, 2});
  check_refused({"--data", generated(), "--num_gpus", "7"}, 2, "--num-gpus 7: this host shows");
  check_refused({"--data", generated(), "--sequence", "5"}, 2, "--episode-steps 128 is no multiple of --sequence 5");
  check_refused({"--data", generated(), "--batch_size", "20"}, 2, "--batch-size 20 is no multiple of --sequence 16");
  check_refused({"--data", generated(), "--plot", "x.png"}, 2, "name a file that ends in .svg, not x.png", {2});
  check_refused({"--data", generated(), "--plot", "/nonexistent/x.svg"}, 1, "cannot create /nonexistent/x.svg.tmp");
  for (const char* option : {"--test-share", "--initial-cash", "--hmax", "--cost", "--turbulence-share", "--clip",
                             "--gamma", "--log-std", "--reward-scale"})
    check_refused({"--data", generated(), option, "nan"}, 2, option + std::string(" must be a number from "), {1});
  check_refused({"generate", folder / "made", "--noise", "nan"}, 2, "--noise must be a number from 0 to 0.2", {1});
  check_refused({"generate", folder / "made", "--seed", "-1"}, 2,
                "--seed must be a whole number of at least 0, not '-1'", {1});
  check_refused({"--data", generated(), "--num_episode", "5"}, 2, "did you mean --num-episodes?");
  check_refused({"--data", generated(), "--assets", "GOOG"}, 1, "there is no file", {2});
  check_refused({"--data", generated(), "--episode-steps", "800"}, 1,
                "PLANTED1.csv:501: ends after 500 rows of prices: at least");
  check_refused(with_prices("row", header + row), 1, "row/X.csv:2: ends after 1 row of prices: at least", {2});
  check_refused(with_prices("nan", header + row + "2024-01-03,1,1,1,NaN,1\n"), 1, "nan/X.csv:3: Close is 'NaN'", {2});
  check_refused(with_prices("order", header + row + "2024-01-01,1,1,1,1,1\n"), 1,
                "order/X.csv:3: 2024-01-01 comes after");
  check_refused(with_prices("column", "Date,Open\n"), 1, "column/X.csv:1: the column High is missing", {2});
}

TEST_CASE("clstm_ppo: accepts names that are not UTF-8", "[clstm_ppo]") {
  const Folder folder;
  write_file(folder / "set/caf\xe9.csv", read_file(std::filesystem::path(generated()) / "PLANTED1.csv"));
  Arguments arguments = quick();
  arguments[1] = folder / "set";
  for (const char* episodes : {"8", "16"}) {
    const Run run = run_clstm_ppo(1, joined(arguments, {"--num-episodes", episodes, "--save-dir", folder / "run"}));
    INFO(run.errors);
    CHECK(run.exit_code == 0);
  }
  CHECK(ddpkit::train::read_checkpoint_info(folder / "run/checkpoint.pt").epoch == 2);
}

TEST_CASE("clstm_ppo: a run killed anywhere and started again ends with the bits of one never killed",
          "[clstm_ppo][.long]") {
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    const Folder whole, killed;
    const auto arguments = [&](const Folder& folder) {
      return with({"--num-episodes", std::to_string(8 * ranks * 40), "--save-dir", folder.path()});
    };
    const Run undisturbed = run_clstm_ppo(ranks, arguments(whole));
    REQUIRE(undisturbed.exit_code == 0);
    const auto runs = run_until_not_killed(
        ranks, undisturbed, [&](const Kill& kill) { return run_clstm_ppo(ranks, arguments(killed), kill); });
    CHECK(runs.kills > 0);
    CHECK(same_bits(weights_of(whole), weights_of(killed)));
  }
}

TEST_CASE("clstm_ppo: a run that reached its last step resumes from its last complete round", "[clstm_ppo]") {
  const Folder whole, parts;
  const Arguments episodes = with({"--num-episodes", "64"});
  REQUIRE(run_clstm_ppo(2, joined(episodes, {"--save-dir", whole.path()})).exit_code == 0);
  // 6 updates per round: stops in the middle of the third.
  REQUIRE(run_clstm_ppo(2, joined(episodes, {"--save-dir", parts.path(), "--max-steps", "15"})).exit_code == 0);
  CHECK(ddpkit::train::read_checkpoint_info(parts / "checkpoint.pt").epoch == 2);
  const Run resumed = run_clstm_ppo(2, joined(episodes, {"--save-dir", parts.path()}));
  CHECK(resumed.lines.size() == 4);
  CHECK(same_bits(weights_of(whole), weights_of(parts)));
  check_refused(joined(episodes, {"--save-dir", parts.path(), "--gamma", "0.5"}), 1, "already holds a run with gamma");
}

TEST_CASE("clstm_ppo: SIGTERM to one rank ends all within a round, and the same command resumes", "[clstm_ppo]") {
  const Folder whole, parts;
  const auto arguments = [&](const Folder& folder) {
    return with({"--num-episodes", "640", "--save-dir", folder.path()});
  };
  const Run undisturbed = run_clstm_ppo(2, arguments(whole));
  REQUIRE(undisturbed.exit_code == 0);
  const auto path = parts / "checkpoint.pt";
  int stops = 0;
  for (Run run;;) {
    // The first kill comes as soon as a round has been saved.
    run = run_clstm_ppo(2, arguments(parts),
                        Kill{.rank = 1,
                             .after_seconds = disturbed_after(undisturbed, stops),
                             .signal = SIGTERM,
                             .at_write_of = stops == 0 ? &path : nullptr});
    INFO(run.errors);
    // A signal before the trainer's handler is installed terminates the process.
    if (run.exit_code != 0) CHECK(run.exit_code == 143);
    if (run.exit_code == 0 && !run.lines.empty() && run.lines.back().starts_with("test return")) break;
    if (run.exit_code == 0) {
      CHECK_THAT(run.errors, ContainsSubstring("clstm_ppo: stopped by SIGTERM after step"));
      const auto kept = std::filesystem::exists(path) ? ddpkit::train::read_checkpoint_info(path).step : 0;
      CHECK_THAT(run.errors, ContainsSubstring(fmt::format("after step {};", kept)));
    }
    if (stops == 0) CHECK(run.exit_code == 0);
    REQUIRE(++stops < 30);
  }
  CHECK(stops > 0);
  CHECK(same_bits(weights_of(whole), weights_of(parts)));
}

TEST_CASE("clstm_ppo: two ranks learn a planted pattern", "[clstm_ppo][.long]") {
  const Folder market;
  clstm_ppo::generate(market / "set", {});
  const Run run =
      run_clstm_ppo(2, {"--data", market / "set", "--test-share", "0.05", "--num-episodes", "640", "--json"});
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  const nlohmann::json test = run.json(run.lines.size() - 2)["test"];
  CHECK(test["share_of_best"] > 0.5);
  CHECK(std::abs(test["buy_and_hold"]["return"].get<double>()) < 0.2);
}
