#include <CLI/CLI.hpp>

#include <ddpkit/comm/environment.h>
#include <ddpkit/error.h>
#include <ddpkit/train/main.h>
#include <ddpkit/train/options.h>

#include "support/catch.h"
#include "support/folder.h"

using namespace ddpkit::train;
using ddpkit::testing::Folder;
using ddpkit::testing::write_file;

namespace {

TrainerOptions parse(std::vector<std::string> arguments, TrainerOptions options = {}) {
  CLI::App app("Test", "test");
  add_trainer_options(app, options);
  std::reverse(arguments.begin(), arguments.end());
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    throw UsageError(describe_parse_error(app, error));
  }
  return options;
}

TrainerOptions parse_config(const std::string& yaml, std::vector<std::string> arguments = {}) {
  const Folder folder;
  write_file(folder / "run.yaml", yaml);
  arguments.insert(arguments.end(), {"--config", (folder / "run.yaml").string()});
  return parse(arguments);
}

}  // namespace

TEST_CASE("the command line sets the options, defaults are the trainer's own", "[options]") {
  const TrainerOptions defaults = parse({}, {.epochs = 7, .lr = 0.5});
  CHECK(defaults.epochs == 7);
  CHECK(defaults.lr == 0.5);
  CHECK_FALSE(defaults.max_steps);
  const TrainerOptions options =
      parse({"--epochs", "3", "--batch-size=64", "--lr", "1e-2", "--seed", "42", "--max-steps", "100", "--save-dir",
             "run", "--resume", "--json", "--backend", "gloo"});
  CHECK(options.epochs == 3);
  CHECK(options.batch_size == 64);
  CHECK(options.lr == 0.01);
  CHECK(options.seed == 42);
  CHECK(options.max_steps == 100);
  CHECK(options.save_dir == "run");
  CHECK(options.resume);
  CHECK(options.json);
  CHECK(options.backend == "gloo");
}

TEST_CASE("a config file sets options, in sections or not, and the command line wins", "[options]") {
  const TrainerOptions options = parse_config(
      "# A comment\n"
      "training:\n"
      "  epochs: 3\n"
      "  lr: 1.0e-2\n"
      "output: {save-dir: run, json: true}\n"
      "seed: 5\n"
      "max-steps: 9\n",
      {"--epochs", "4"});
  CHECK(options.epochs == 4);
  CHECK(options.lr == 0.01);
  CHECK(options.save_dir == "run");
  CHECK(options.json);
  CHECK(options.seed == 5);
  CHECK(options.max_steps == 9);
  CHECK_FALSE(parse_config("json: false").json);
  CHECK(parse_config("").epochs == TrainerOptions{}.epochs);
}

TEST_CASE("an error in a config file is reported with its line", "[options]") {
  CHECK_THROWS_WITH(parse_config("lr: 1\n\nepoch: 3\n"),
                    ContainsSubstring("run.yaml:3: unknown option 'epoch'; did you mean epochs?"));
  CHECK_THROWS_WITH(parse_config("a:\n  bach-size: 3\n"),
                    ContainsSubstring("run.yaml:2: unknown option 'bach-size'; did you "
                                      "mean batch-size?"));
  CHECK_THROWS_WITH(parse_config("xyzzy: 3\n"), Catch::Matchers::EndsWith("run.yaml:1: unknown option 'xyzzy'"));
  CHECK_THROWS_WITH(parse_config("help: true\n"), ContainsSubstring("unknown option 'help'"));
  CHECK_THROWS_WITH(parse_config("config: x\n"), ContainsSubstring("unknown option 'config'"));
  CHECK_THROWS_WITH(parse_config("a: {lr: 1}\nb: {lr: 2}\n"), ContainsSubstring("run.yaml:2: 'lr' is given twice"));
  CHECK_THROWS_WITH(parse_config("lr:\n"), ContainsSubstring("run.yaml:1: 'lr' needs a value"));
  CHECK_THROWS_WITH(parse_config("lr: {x: 1}\n"), ContainsSubstring("run.yaml:1: 'lr' needs a value"));
  CHECK_THROWS_WITH(parse_config("lr: [\n"), ContainsSubstring("not valid YAML"));
  CHECK_THROWS_WITH(parse_config("- 1\n"), ContainsSubstring("must hold KEY: VALUE lines"));
  CHECK_THROWS_WITH(parse_config("epochs: 0\n"), ContainsSubstring("--epochs: must be at least 1, not 0"));
  CHECK_THROWS_AS(parse({"--config", "/nonexistent.yaml"}), UsageError);
  // YAML aliases: one that contains itself, and some that double their content.
  CHECK_THROWS_WITH(parse_config("x: &a\n  y: *a\n"), ContainsSubstring("run.yaml:2: nested more than 64 levels deep"));
  std::string doubled = "a0: &a0 {}\n";
  for (int i = 1; i < 40; ++i)
    doubled += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " {p: *a" + std::to_string(i - 1) + ", q: *a" +
               std::to_string(i - 1) + "}\n";
  CHECK_THROWS_WITH(parse_config(doubled), ContainsSubstring("more than 10000 values in all"));
}

TEST_CASE("a wrong option is one sentence that names it", "[options]") {
  CHECK_THROWS_WITH(parse({"--epoch", "3"}), "unknown option --epoch; did you mean --epochs?");
  CHECK_THROWS_WITH(parse({"--bach-size=3"}), "unknown option --bach-size; did you mean --batch-size?");
  CHECK_THROWS_WITH(parse({"--frobnicate"}), "unknown option --frobnicate");
  CHECK_THROWS_WITH(parse({"file"}), "unexpected argument 'file'");
  CHECK_THROWS_WITH(parse({"--batch-size", "0"}), "--batch-size: must be at least 1, not 0");
  CHECK_THROWS_WITH(parse({"--batch-size", "-5"}), "--batch-size: must be at least 1, not -5");
  CHECK_THROWS_WITH(parse({"--batch-size", "99999999999"}), ContainsSubstring("must be a whole number up to"));
  CHECK_THROWS_WITH(parse({"--epochs", "3.5"}), ContainsSubstring("--epochs: must be a whole number"));
  CHECK_THROWS_WITH(parse({"--lr", "nan"}), "--lr: must be a number above 0, not nan");
  CHECK_THROWS_WITH(parse({"--lr", "-1"}), "--lr: must be a number above 0, not -1");
  CHECK_THROWS_WITH(parse({"--lr", "0.1x"}), "--lr: must be a number above 0, not 0.1x");
  CHECK_THROWS_WITH(parse({"--seed", "-1"}), "--seed: must be at least 0, not -1");
  CHECK_THROWS_WITH(parse({"--backend", "tcp"}), ContainsSubstring("--backend: tcp not in"));
  CHECK_THROWS_WITH(parse({"--resume"}), ContainsSubstring("--resume requires --save-dir"));
  CHECK_THROWS_WITH(parse({"--save-dir", "x", "--resume", "--overwrite"}), ContainsSubstring("excludes --"));
}

TEST_CASE("the suggested name differs by one typing error", "[options]") {
  const std::vector<std::string> names = {"epochs", "lr", "batch-size"};
  CHECK(nearest("epoch", names) == "epochs");
  CHECK(nearest("batchsize", names) == "batch-size");
  CHECK(nearest("batch_size", names) == "batch-size");
  CHECK(nearest("momentum", names).empty());
  CHECK(nearest("", {}).empty());
}

TEST_CASE("a range takes numbers and nothing else", "[options]") {
  const CLI::Validator number = number_between(0, 0.5), whole = whole_number(-1, 1024);
  const auto check = [](const CLI::Validator& validator, std::string text) { return validator(text); };
  for (const char* good : {"0", "0.25", "0.5", "5e-1"}) CHECK(check(number, good).empty());
  for (const char* bad : {"nan", "-nan", "NaN", "inf", "-0.1", "0.51", "", "x", "0.1x", " 0.1"})
    CHECK(check(number, bad) == std::string("must be a number from 0 to 0.5, not ") + bad);
  for (const char* good : {"-1", "0", "1024"}) CHECK(check(whole, good).empty());
  for (const char* bad : {"nan", "1025", "1.5", "99999999999999999999", ""})
    CHECK(check(whole, bad) == std::string("must be a whole number up to 1024, not ") + bad);
  CHECK(check(whole, "-2") == "must be at least -1, not -2");
}

TEST_CASE("the ranks to start are a number, or gpu, cpu or auto", "[options]") {
  using ddpkit::train::count_ranks;
  CHECK(count_ranks("3", 8) == 3);
  CHECK(count_ranks("gpu", 8) == 8);
  CHECK(count_ranks("auto", 8) == 8);
  CHECK(count_ranks("cpu", 8) == ddpkit::available_cores());
  CHECK(count_ranks("auto", 0) == ddpkit::available_cores());
  CHECK_THROWS_AS(count_ranks("gpu", 0), ddpkit::InvalidArgument);
  for (std::string text : {"0", "4097", "2x", "gpus"})
    CHECK_THAT(ddpkit::train::rank_count()(text),
               ContainsSubstring("must be a number from 1 to 4096, gpu, cpu or auto"));
}
