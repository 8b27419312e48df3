#include <fmt/format.h>

#include <ddpkit/comm/environment.h>
#include <ddpkit/error.h>
#include <ddpkit/train/launch.h>
#include <ddpkit/train/options.h>
#include <ddpkit/train/run_options.h>

#include "support/catch.h"
#include "support/folder.h"

using namespace ddpkit::train;
using Catch::Matchers::EndsWith;
using ddpkit::testing::Folder;
using ddpkit::testing::write_file;

namespace {

std::string parse(Options& options, const std::vector<std::string>& arguments) {
  std::vector<const char*> pointers = {"test"};
  for (const std::string& argument : arguments) pointers.push_back(argument.c_str());
  return options.parse(static_cast<int>(pointers.size()), pointers.data());
}

RunOptions parse_run(const std::vector<std::string>& arguments, RunOptions run = {}) {
  Options options("test", "Test");
  declare(options, run);
  parse(options, arguments);
  return run;
}

RunOptions parse_config(const std::string& yaml, std::vector<std::string> arguments = {}) {
  const Folder folder;
  write_file(folder / "run.yaml", yaml);
  arguments.insert(arguments.end(), {"--config", (folder / "run.yaml").string()});
  return parse_run(arguments);
}

/// Options of each kind, in sections.
struct Values {
  double lr = 1e-3;
  int epochs = 10;
  std::vector<std::string> include;
  std::vector<std::int64_t> strides = {2, 2};
  std::string backend;
  std::optional<std::int64_t> most = 5;
  bool on = false;

  void declare(Options& options) {
    options.section("training");
    options.add("lr", &lr, "Rate").between(0, 10);
    options.add("epochs", &epochs, "Epochs").at_least(1).also("max_epochs");
    options.add("most", &most, "Most").at_least(1);
    options.section("data");
    options.add("include", &include, "Names");
    options.add("strides", &strides, "Strides").between(1, 100);
    options.section("distributed");
    options.add("backend", &backend, "Backend").one_of({"shm", "gloo"});
    options.add("on", &on, "On");
  }
};

/// Parses with a file c.yaml. Returns the message of the error.
std::string refusal(const Folder& folder, const std::string& yaml, const std::vector<std::string>& more = {}) {
  write_file(folder / "c.yaml", yaml);
  Values values;
  Options options("test", "");
  values.declare(options);
  std::vector<std::string> arguments = {"--config", folder / "c.yaml"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  try {
    parse(options, arguments);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "nothing was wrong";
}

}  // namespace

TEST_CASE("the command line sets the options, defaults are the trainer's own", "[options]") {
  const RunOptions defaults = parse_run({}, {.epochs = 7, .lr = 0.5});
  CHECK(defaults.epochs == 7);
  CHECK(defaults.lr == 0.5);
  CHECK_FALSE(defaults.max_steps);
  const RunOptions run = parse_run({"--epochs", "3", "--batch-size=64", "--lr", "1e-2", "--seed", "42", "--max-steps",
                                    "100", "--save-dir", "run", "--resume", "--json", "--backend", "gloo", "--no-amp"});
  CHECK(run.epochs == 3);
  CHECK(run.batch_size == 64);
  CHECK(run.lr == 0.01);
  CHECK(run.seed == 42);
  CHECK(run.max_steps == 100);
  CHECK(run.save_dir == "run");
  CHECK(run.resume);
  CHECK(run.json);
  CHECK(run.backend == "gloo");
  CHECK_FALSE(run.amp);
  CHECK(parse_run({"--backend", "auto"}).backend.empty());
}

TEST_CASE("a name has dashes or underscores, a section or none, and aliases", "[options]") {
  for (const char* argument :
       {"--batch_size=3", "--batch-size=3", "--training.batch-size=3", "batch_size=3", "training.batch-size=3"}) {
    CAPTURE(argument);
    CHECK(parse_run({argument}).batch_size == 3);
  }
  CHECK(parse_run({"--checkpoint-steps", "2"}).save_steps == 2);
  CHECK(parse_run({"training.clip_norm=2"}).max_grad_norm == 2);
  CHECK(parse_run({"run.log_steps=2"}).logging_steps == 2);
  CHECK(parse_run({"data.workers=2"}).num_workers == 2);
  CHECK(parse_run({"--spawn", "2"}).launch.nproc_per_node == "2");
}

TEST_CASE("an option whose name another section has too is reached with its section", "[options]") {
  int train = 1, evaluate = 2;
  Options options("test", "");
  options.section("training");
  options.add("batch_size", &train, "");
  options.section("evaluation");
  options.add("batch_size", &evaluate, "");
  parse(options, {"--batch-size", "3", "evaluation.batch_size=4"});
  CHECK(train == 3);
  CHECK(evaluate == 4);
  CHECK(options.resolved() == R"({"batch_size":3,"evaluation.batch_size":4})");
}

TEST_CASE("a config file sets options, in sections or not, and the command line wins", "[options]") {
  const RunOptions run = parse_config(
      "# A comment\n"
      "training:\n"
      "  epochs: 3\n"
      "  lr: 1.0e-2\n"
      "output: {save-dir: run, json: true}\n"
      "seed: 5\n"
      "max-steps: 9\n",
      {"--epochs", "4", "seed=6"});
  CHECK(run.epochs == 4);
  CHECK(run.lr == 0.01);
  CHECK(run.save_dir == "run");
  CHECK(run.json);
  CHECK(run.seed == 6);
  CHECK(run.max_steps == 9);
  CHECK_FALSE(parse_config("json: false").json);
  CHECK(parse_config("").epochs == RunOptions{}.epochs);
  // A flag has priority over KEY=VALUE, whatever their order.
  CHECK(parse_run({"--lr", "2", "lr=3"}).lr == 2);
  CHECK(parse_run({"lr=3", "lr=4"}).lr == 4);
}

TEST_CASE("an error in a config file is reported with its line", "[options]") {
  CHECK_THROWS_WITH(parse_config("lr: 1\n\nepoch: 3\n"),
                    ContainsSubstring("run.yaml:3: unknown option 'epoch'; did you mean epochs?"));
  CHECK_THROWS_WITH(parse_config("a:\n  bach-size: 3\n"),
                    ContainsSubstring("run.yaml:2: unknown option 'a.bach-size'"));
  CHECK_THROWS_WITH(parse_config("xyzzy: 3\n"), EndsWith("run.yaml:1: unknown option 'xyzzy'"));
  CHECK_THROWS_WITH(parse_config("help: true\n"), ContainsSubstring("unknown option 'help'"));
  CHECK_THROWS_WITH(parse_config("config: x\n"), ContainsSubstring("unknown option 'config'"));
  CHECK_THROWS_WITH(parse_config("a: {lr: 1}\nb: {lr: 2}\n"), ContainsSubstring("run.yaml:2: 'b.lr' is given twice"));
  CHECK_THROWS_WITH(parse_config("lr:\n"), ContainsSubstring("run.yaml:1: lr must be a number above 0, not ''"));
  CHECK_THROWS_WITH(parse_config("lr: {x: 1}\n"), ContainsSubstring("run.yaml:1: unknown option 'lr.x'"));
  CHECK_THROWS_WITH(parse_config("lr: [\n"), ContainsSubstring("not valid YAML"));
  CHECK_THROWS_WITH(parse_config("- 1\n"), ContainsSubstring("must hold KEY: VALUE lines"));
  CHECK_THROWS_WITH(
      parse_config("training:\n  epochs: 0\n"),
      ContainsSubstring("run.yaml:2: training.epochs must be a whole number from 1 to 2147483647, not '0'"));
  CHECK_THROWS_AS(parse_run({"--config", "/nonexistent.yaml"}), UsageError);
  // YAML aliases: one that contains itself, and some that double their content.
  CHECK_THROWS_WITH(parse_config("x: &a\n  y: *a\n"), ContainsSubstring("run.yaml:2: nested more than 64 levels deep"));
  std::string doubled = "a0: &a0 {}\n";
  for (int i = 1; i < 40; ++i)
    doubled += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " {p: *a" + std::to_string(i - 1) + ", q: *a" +
               std::to_string(i - 1) + "}\n";
  CHECK_THROWS_WITH(parse_config(doubled), ContainsSubstring("more than 10000 values in all"));
}

TEST_CASE("a wrong option is one sentence that names it", "[options]") {
  CHECK_THROWS_WITH(parse_run({"--epoch", "3"}), "unknown option --epoch; did you mean --epochs?");
  CHECK_THROWS_WITH(parse_run({"--bach-size=3"}), "unknown option --bach-size; did you mean --batch-size?");
  CHECK_THROWS_WITH(parse_run({"--frobnicate"}), "unknown option --frobnicate");
  CHECK_THROWS_WITH(parse_run({"-x"}), "unknown option -x");
  CHECK_THROWS_WITH(parse_run({"file"}), "unexpected argument 'file'");
  CHECK_THROWS_WITH(parse_run({"training.lrr=1"}), "unknown option 'training.lrr'; did you mean training.lr?");
  CHECK_THROWS_WITH(parse_run({"--batch-size", "0"}),
                    "--batch-size must be a whole number from 1 to 2147483647, not '0'");
  CHECK_THROWS_WITH(parse_run({"--batch-size", "-5"}), ContainsSubstring("not '-5'"));
  CHECK_THROWS_WITH(parse_run({"--batch-size", "99999999999"}), ContainsSubstring("must be a whole number from 1 to"));
  CHECK_THROWS_WITH(parse_run({"--epochs", "3.5"}), ContainsSubstring("--epochs must be a whole number"));
  CHECK_THROWS_WITH(parse_run({"--lr", "nan"}), "--lr must be a number above 0, not 'nan'");
  CHECK_THROWS_WITH(parse_run({"--lr", "-1"}), "--lr must be a number above 0, not '-1'");
  CHECK_THROWS_WITH(parse_run({"--lr", "0"}), "--lr must be a number above 0, not '0'");
  CHECK_THROWS_WITH(parse_run({"--lr", "0.1x"}), "--lr must be a number above 0, not '0.1x'");
  CHECK_THROWS_WITH(parse_run({"training.lr=fast"}), "training.lr must be a number above 0, not 'fast'");
  CHECK_THROWS_WITH(parse_run({"--seed", "-1"}), "--seed must be a whole number of at least 0, not '-1'");
  CHECK_THROWS_WITH(parse_run({"--backend", "tcp"}),
                    "--backend must be one of auto, shm, gloo, nccl, hierarchical, not 'tcp'");
  CHECK_THROWS_WITH(parse_run({"--json=maybe"}), "--json must be true or false, not 'maybe'");
  CHECK_THROWS_WITH(parse_run({"--lr"}), "--lr needs a value");
  CHECK_THROWS_WITH(parse_run({"--save-dir", "--json"}), "--save-dir needs a value");
  CHECK_THROWS_WITH(parse_run({"--lr", "1", "--lr", "2"}), "'--lr' is given twice");
  CHECK_THROWS_WITH(parse_run({"--save-dir", "x", "--resume", "--overwrite"}), "--overwrite excludes --resume");
}

TEST_CASE("an option needs another one only if it has an effect", "[options]") {
  CHECK_THROWS_WITH(parse_run({"--min-ranks", "2"}), "--min-ranks needs --elastic");
  CHECK_THROWS_WITH(parse_config("min_ranks: 2"), ContainsSubstring("run.yaml:1: min_ranks needs --elastic"));
  CHECK(parse_config("min_ranks: 1").min_ranks == 1);  // As in the file that a run writes.
  CHECK(parse_config("{min_ranks: 2, elastic: true}").min_ranks == 2);
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
  const auto check = [](const std::string& name, const std::string& text) -> std::string {
    double number = 0;
    int whole = 0;
    Options options("test", "");
    options.add("number", &number, "").between(0, 0.5);
    options.add("whole", &whole, "").between(-1, 1024);
    try {
      parse(options, {"--" + name + "=" + text});
    } catch (const UsageError& error) {
      return error.what();
    }
    return "";
  };
  for (const char* good : {"0", "0.25", "0.5", "5e-1", "+0.5"}) CHECK(check("number", good).empty());
  for (const char* bad : {"nan", "-nan", "NaN", "inf", "-0.1", "0.51", "", "x", "0.1x", " 0.1"})
    CHECK(check("number", bad) == fmt::format("--number must be a number from 0 to 0.5, not '{}'", bad));
  for (const char* good : {"-1", "0", "1024"}) CHECK(check("whole", good).empty());
  for (const char* bad : {"nan", "1025", "1.5", "-2", "99999999999999999999", ""})
    CHECK(check("whole", bad) == fmt::format("--whole must be a whole number from -1 to 1024, not '{}'", bad));
}

TEST_CASE("a file is composed of its defaults in their order, then its own keys, then KEY=VALUE", "[options]") {
  const Folder folder;
  write_file(folder / "base_config.yaml", "training:\n  lr: 0.5\n  epochs: 3\ndata:\n  include: [a]\n");
  write_file(folder / "distributed.yml", "training: {lr: 0.25}\ndistributed: {backend: gloo}\n");
  write_file(folder / "own.yaml", "defaults: [base_config, distributed.yml]\ndata: {include: [b, c]}\n");
  const auto read = [&](std::vector<std::string> arguments) {
    Values values;
    Options options("test", "");
    values.declare(options);
    arguments.insert(arguments.end(), {"--config", folder / "own.yaml"});
    parse(options, arguments);
    return values;
  };
  Values values = read({});
  CHECK(values.lr == 0.25);
  CHECK(values.epochs == 3);
  CHECK(values.include == std::vector<std::string>{"b", "c"});
  CHECK(values.backend == "gloo");
  values = read({"training.lr=2e-3", "data.include=[x/, y/]", "training.epochs=7", "data.strides=3,4", "most="});
  CHECK(values.lr == 2e-3);
  CHECK(values.include == std::vector<std::string>{"x/", "y/"});
  CHECK(values.epochs == 7);
  CHECK(values.strides == std::vector<std::int64_t>{3, 4});
  CHECK_FALSE(values.most);
  CHECK(read({"--strides", "3", "--strides", "4,5"}).strides == std::vector<std::int64_t>{3, 4, 5});
}

TEST_CASE("errors in files and KEY=VALUE name the source", "[options]") {
  const Folder folder;
  const auto refused = [&](const std::string& yaml, const std::vector<std::string>& more = {}) {
    return refusal(folder, yaml, more);
  };
  CHECK_THAT(refused("training:\n  lrr: 1\n"),
             ContainsSubstring("c.yaml:2: unknown option 'training.lrr'; did you mean training.lr?"));
  CHECK_THAT(refused("training:\n  lr: fast\n"),
             ContainsSubstring("c.yaml:2: training.lr must be a number from 0 to 10, not 'fast'"));
  CHECK_THAT(refused("training:\n  lr: .nan\n"), ContainsSubstring("training.lr must be"));
  CHECK_THAT(refused("training:\n  lr: 1 2\n"), ContainsSubstring("not '1 2'"));
  CHECK_THAT(refused("training:\n  epochs: 1.5\n"), ContainsSubstring("must be a whole number"));
  CHECK_THAT(refused("training:\n  epochs: 99999999999\n"), ContainsSubstring("must be a whole number"));
  CHECK_THAT(refused("training:\n  epochs: [1, 2]\n"), ContainsSubstring("a single value, not '[1, 2]'"));
  CHECK_THAT(refused("strides: [1, x]\n"),
             ContainsSubstring("a list, each a whole number from 1 to 100, not '[1, x]'"));
  CHECK_THAT(refused("distributed: {backend: smh}\n"), ContainsSubstring("must be one of shm, gloo, not 'smh'"));
  CHECK_THAT(refused("training: 3\n"), ContainsSubstring("unknown option 'training'"));
  CHECK_THAT(refused("a: 1\na: 2\n"), ContainsSubstring("c.yaml:2: 'a' is given twice"));
  CHECK_THAT(refused("training.lr: 1\ntraining: {lr: 2}\n"), ContainsSubstring("is given twice"));
  CHECK_THAT(refused("lr: 1\ntraining: {lr: 2}\n"), ContainsSubstring("c.yaml:2: 'training.lr' is given twice"));
  CHECK_THAT(refused("- a\n- b\n"), ContainsSubstring("must hold KEY: VALUE lines"));
  CHECK_THAT(refused("a: [1\nb: 2\n"), ContainsSubstring("not valid YAML"));
  CHECK_THAT(refused("defaults: nowhere\n"), ContainsSubstring("c.yaml:1: defaults must be a list"));
  CHECK_THAT(refused("defaults: [nowhere]\n"), ContainsSubstring("nowhere.yaml, which"));
  CHECK_THAT(refused("training: {lr: 1}\n", {"training.lr"}), ContainsSubstring("unexpected argument 'training.lr'"));
  CHECK_THAT(refused("training: {lr: 1}\n", {"training.lt=3"}), ContainsSubstring("unknown option 'training.lt'"));
  CHECK_THAT(refused("training: {lr: 1}\n", {"training.lr=[3"}), ContainsSubstring("not valid YAML"));
  CHECK_THROWS_WITH(parse_run({"--config", folder / "gone.yaml"}), ContainsSubstring("there is no config file"));
  CHECK_THROWS_WITH(parse_run({"--config", folder.path()}), ContainsSubstring("there is no config file"));
}

TEST_CASE("files that include themselves, or grow without bound, are refused", "[options]") {
  const Folder folder;
  const auto load = [&](const char* name) { parse_run({"--config", folder / name}); };
  write_file(folder / "a.yaml", "defaults: [b]\n");
  write_file(folder / "b.yaml", "seed: 1\ndefaults:\n  - a\n");
  CHECK_THROWS_WITH(load("a.yaml"), ContainsSubstring("b.yaml:3: ") && ContainsSubstring("itself"));
  // 2^7 files through two defaults per file.
  for (int i = 0; i < 8; ++i)
    write_file(folder / fmt::format("d{}.yaml", i), fmt::format("defaults: [d{}, d{}]\n", i + 1, i + 1));
  write_file(folder / "d8.yaml", "seed: 1\n");
  CHECK_THROWS_WITH(load("d0.yaml"), ContainsSubstring("more than 100 files"));
  std::string bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n";
  for (int i = 1; i < 10; ++i) {
    bomb += fmt::format("a{}: &a{} {{", i, i);
    for (int j = 0; j < 10; ++j) bomb += fmt::format("k{}: *a{}, ", j, i - 1);
    bomb += "}\n";
  }
  write_file(folder / "bomb.yaml", bomb);
  CHECK_THROWS_WITH(load("bomb.yaml"), ContainsSubstring("more than 10000 values"));
  write_file(folder / "knot.yaml", "a: &a {b: *a}\n");
  CHECK_THROWS_AS(load("knot.yaml"), UsageError);
  write_file(folder / "deep.yaml", fmt::format("a: {:[<100000}{:]<100000}\n", "", ""));
  CHECK_THROWS_AS(load("deep.yaml"), UsageError);
  write_file(folder / "big.yaml", fmt::format("a: {:x<2000000}\n", ""));
  CHECK_THROWS_WITH(load("big.yaml"), ContainsSubstring("larger than 1 MiB"));
}

TEST_CASE("resolved options can be read back", "[options]") {
  Values values;
  Options options("test", "");
  values.declare(options);
  parse(options, {"--lr=0.1", "include=[p, 'x: y']", "--on", "most="});
  const std::string resolved = options.resolved();
  CHECK(resolved ==
        R"({"backend":"","epochs":10,"include":["p","x: y"],"lr":0.1,"most":null,"on":true,"strides":[2,2]})");
  Values again;
  Options other("test", "");
  again.declare(other);
  other.parse_resolved(R"({"backend":"gloo","epochs":10,"include":["p","x: y"],"lr":0.1,"most":null,"on":true})",
                       "here");
  CHECK(again.lr == 0.1);
  CHECK(again.include == std::vector<std::string>{"p", "x: y"});
  CHECK(again.on);
  CHECK_FALSE(again.most);
  Options third("test", "");
  again.declare(third);
  CHECK_THROWS_WITH(third.parse_resolved("{\"lr\": true}", "there"), ContainsSubstring("there:1: lr must be a number"));
}

TEST_CASE("commands have private options, or also the options of the program", "[options]") {
  int epochs = 1, count = 2;
  std::vector<std::string> files;
  std::string folder;
  const auto run = [&](const std::vector<std::string>& arguments) {
    epochs = 1, count = 2, files.clear(), folder.clear();
    Options options("test", "");
    options.add("epochs", &epochs, "Epochs").required();
    Options& train = options.command("train", "Train", true);
    Options& read = options.command("read", "Read", true);
    read.add("file", &files, "Files").positional().required();
    Options& generate = options.command("generate", "Generate");
    generate.add("folder", &folder, "New folder").positional().required();
    generate.add("count", &count, "Count");
    parse(options, arguments);
    return train.is_chosen() ? "train" : read.is_chosen() ? "read" : generate.is_chosen() ? "generate" : "";
  };
  CHECK(run({"--epochs", "3"}) == std::string());
  CHECK(run({"train", "--epochs", "3"}) == std::string("train"));
  CHECK(epochs == 3);
  CHECK(run({"--epochs", "4", "train"}) == std::string("train"));
  CHECK(run({"read", "a", "epochs=5", "b=c", "--", "epochs=6"}) == std::string("read"));
  CHECK(epochs == 5);
  CHECK(files == std::vector<std::string>{"a", "b=c", "epochs=6"});
  CHECK(run({"generate", "x", "--count", "7"}) == std::string("generate"));
  CHECK(folder == "x");
  CHECK(count == 7);
  CHECK_THROWS_WITH(run({"train"}), "--epochs is required");
  CHECK_THROWS_WITH(run({"generate"}), "folder is required");
  CHECK_THROWS_WITH(run({"generate", "x", "--epochs", "3"}), ContainsSubstring("unknown option --epochs"));
  CHECK_THROWS_WITH(run({"generate", "x", "y"}), "unexpected argument 'y'");
  CHECK_THROWS_WITH(run({"trian"}), "unexpected argument 'trian'; the commands are train, read, generate");
}

TEST_CASE("the arguments of another program follow the options", "[options]") {
  const auto run = [](const std::vector<std::string>& arguments) {
    std::vector<std::string> program;
    int ranks = 0;
    Options options("test", "");
    options.add("ranks", &ranks, "Ranks").also("n");
    options.add("program", &program, "Program").rest().required();
    parse(options, arguments);
    program.insert(program.begin(), std::to_string(ranks));
    return program;
  };
  using Words = std::vector<std::string>;
  for (const Words& ranks : {Words{"-n", "2"}, Words{"-n2"}, Words{"--ranks=2"}}) {
    for (const Words& mark : {Words{}, Words{"--"}}) {
      Words arguments = ranks;
      arguments.insert(arguments.end(), mark.begin(), mark.end());
      arguments.insert(arguments.end(), {"prog", "-n", "3", "--x=a,b", "--", "k=v"});
      CHECK(run(arguments) == Words{"2", "prog", "-n", "3", "--x=a,b", "--", "k=v"});
    }
  }
  CHECK_THROWS_WITH(run({"-n", "2"}), "program is required");
}

TEST_CASE("help lists all options by section, with their defaults", "[options]") {
  Values values;
  values.on = true;
  Options options("test", "Tests options.");
  values.declare(options);
  std::string secret;
  options.add("secret", &secret, "").hidden();
  options.command("train", "Train a model", true).epilog("More.");
  const std::string help = parse(options, {"--lr", "x", "--help"});
  for (const char* line :
       {"test: Tests options.\n", "Usage: test [COMMAND]", "Subcommands:\n  train ", "\ntraining:\n  --lr X ",
        "Rate [0.001]\n", "--epochs, --max-epochs N ", "--include TEXT,... ", "Strides [2,2]\n", "--backend NAME ",
        "--on, --no-on ", "On [on]\n", "--config TEXT"})
    CHECK_THAT(help, ContainsSubstring(line));
  CHECK_THAT(help, !ContainsSubstring("secret"));
  CHECK_THAT(parse(options, {"train", "-h"}), ContainsSubstring("More.") && ContainsSubstring("--epochs"));
}

TEST_CASE("the ranks to start are a number, or gpu, cpu or auto", "[options]") {
  CHECK(count_ranks("3", 8) == 3);
  CHECK(count_ranks("gpu", 8) == 8);
  CHECK(count_ranks("auto", 8) == 8);
  CHECK(count_ranks("cpu", 8) == ddpkit::available_cores());
  CHECK(count_ranks("auto", 0) == ddpkit::available_cores());
  CHECK_THROWS_AS(count_ranks("gpu", 0), ddpkit::InvalidArgument);
  for (const char* text : {"0", "4097", "2x", "gpus"})
    CHECK_THROWS_WITH(
        parse_run({"--nproc-per-node", text}),
        fmt::format("--nproc-per-node must be a number from 1 to 4096, gpu, cpu or auto, not '{}'", text));
  for (const char* text : {"1", "4096", "gpu", "cpu", "auto"})
    CHECK(parse_run({"--nproc-per-node", text}).launch.nproc_per_node == text);
}
