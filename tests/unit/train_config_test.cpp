#include <fmt/format.h>

#include <ddpkit/train/config.h>
#include <ddpkit/train/main.h>

#include "support/catch.h"
#include "support/folder.h"

using ddpkit::testing::Folder;
using ddpkit::testing::write_file;
using ddpkit::train::Config;
using ddpkit::train::UsageError;

namespace {

struct Read {
  double lr = 1e-3;
  int epochs = 10;
  std::vector<std::string> include;
  std::string backend;
};

Read read_all(Config config) {
  Read read;
  config.read("training.lr", read.lr, {.least = 0, .most = 10});
  config.read("training.epochs", read.epochs, {.least = 1});
  config.read("data.include", read.include);
  config.read("distributed.backend", read.backend, {"shm", "gloo"});
  config.check_all_known();
  return read;
}

}  // namespace

TEST_CASE("a config is composed of its defaults in their order, then its own keys, then overrides", "[config]") {
  const Folder folder;
  write_file(folder / "base_config.yaml", "training:\n  lr: 0.5\n  epochs: 3\ndata:\n  include: [a]\n");
  write_file(folder / "distributed.yml", "training: {lr: 0.25}\ndistributed: {backend: gloo}\n");
  write_file(folder / "own.yaml", "defaults: [base_config, distributed.yml]\ndata: {include: [b, c]}\n");
  Config config = Config::load(folder / "own.yaml");
  Read read = read_all(config);
  CHECK(read.lr == 0.25);
  CHECK(read.epochs == 3);
  CHECK(read.include == std::vector<std::string>{"b", "c"});
  CHECK(read.backend == "gloo");

  config.override_with("training.lr=2e-3");
  config.override_with("data.include=[x/, y/]");
  config.set("training.epochs", "7");
  read = read_all(config);
  CHECK(read.lr == 2e-3);
  CHECK(read.include == std::vector<std::string>{"x/", "y/"});
  CHECK(read.epochs == 7);
}

TEST_CASE("errors in a config are reported with file and line", "[config]") {
  const Folder folder;
  const auto refusal = [&](const std::string& text, const std::string& override_ = "") -> std::string {
    write_file(folder / "c.yaml", text);
    try {
      Config config = Config::load(folder / "c.yaml");
      if (!override_.empty()) config.override_with(override_);
      read_all(config);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "nothing was wrong";
  };
  CHECK_THAT(refusal("training:\n  lrr: 1\n"), ContainsSubstring("c.yaml:2: unknown key 'training.lrr'"));
  CHECK_THAT(refusal("training:\n  lrr: 1\n"), ContainsSubstring("did you mean training.lr?"));
  CHECK_THAT(refusal("training:\n  lr: fast\n"),
             ContainsSubstring("c.yaml:2: training.lr must be a number from 0 to 10, not 'fast'"));
  CHECK_THAT(refusal("training:\n  lr: .nan\n"), ContainsSubstring("training.lr must be"));
  CHECK_THAT(refusal("training:\n  lr: 1 2\n"), ContainsSubstring("not '1 2'"));
  CHECK_THAT(refusal("training:\n  epochs: 1.5\n"), ContainsSubstring("must be a whole number"));
  CHECK_THAT(refusal("training:\n  epochs: 99999999999\n"), ContainsSubstring("must be a whole number"));
  CHECK_THAT(refusal("training:\n  epochs: 0\n"), ContainsSubstring("not '0'"));
  CHECK_THAT(refusal("training:\n  epochs: [1, 2]\n"), ContainsSubstring("a single value, not '[1, 2]'"));
  CHECK_THAT(refusal("distributed: {backend: smh}\n"), ContainsSubstring("must be one of shm, gloo, not 'smh'"));
  CHECK_THAT(refusal("training: 3\n"), ContainsSubstring("unknown key 'training'"));
  CHECK_THAT(refusal("a: 1\na: 2\n"), ContainsSubstring("c.yaml:2: 'a' is given twice"));
  CHECK_THAT(refusal("training.lr: 1\ntraining: {lr: 2}\n"), ContainsSubstring("is given twice"));
  CHECK_THAT(refusal("- a\n- b\n"), ContainsSubstring("must hold KEY: VALUE lines"));
  CHECK_THAT(refusal("a: [1\nb: 2\n"), ContainsSubstring("not valid YAML"));
  CHECK_THAT(refusal("defaults: nowhere\n"), ContainsSubstring("c.yaml:1: defaults must be a list"));
  CHECK_THAT(refusal("defaults: [nowhere]\n"), ContainsSubstring("nowhere.yaml, which"));
  CHECK_THAT(refusal("training: {lr: 1}\n", "training.lr"), ContainsSubstring("is no KEY=VALUE"));
  CHECK_THAT(refusal("training: {lr: 1}\n", "training.lt=3"), ContainsSubstring("the command line: unknown key"));
  CHECK_THAT(refusal("training: {lr: 1}\n", "training.lr=[3"), ContainsSubstring("not valid YAML"));
  CHECK_THROWS_WITH(Config::load(folder / "gone.yaml"), ContainsSubstring("there is no config file"));
  CHECK_THROWS_WITH(Config::load(folder.path()), ContainsSubstring("there is no config file"));
}

TEST_CASE("configs that include themselves, or grow without bound, are refused", "[config]") {
  const Folder folder;
  write_file(folder / "a.yaml", "defaults: [b]\n");
  write_file(folder / "b.yaml", "x: 1\ndefaults:\n  - a\n");
  CHECK_THROWS_WITH(Config::load(folder / "a.yaml"), ContainsSubstring("b.yaml:3: ") && ContainsSubstring("itself"));
  // 2^7 files through two defaults per file.
  for (int i = 0; i < 8; ++i)
    write_file(folder / fmt::format("d{}.yaml", i), fmt::format("defaults: [d{}, d{}]\n", i + 1, i + 1));
  write_file(folder / "d8.yaml", "x: 1\n");
  CHECK_THROWS_WITH(Config::load(folder / "d0.yaml"), ContainsSubstring("more than 100 files"));
  std::string bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n";
  for (int i = 1; i < 10; ++i) {
    bomb += fmt::format("a{}: &a{} {{", i, i);
    for (int j = 0; j < 10; ++j) bomb += fmt::format("k{}: *a{}, ", j, i - 1);
    bomb += "}\n";
  }
  write_file(folder / "bomb.yaml", bomb);
  CHECK_THROWS_WITH(Config::load(folder / "bomb.yaml"), ContainsSubstring("more than 10000 values"));
  write_file(folder / "knot.yaml", "a: &a {b: *a}\n");
  CHECK_THROWS_AS(Config::load(folder / "knot.yaml"), UsageError);
  write_file(folder / "deep.yaml", fmt::format("a: {:[<100000}{:]<100000}\n", "", ""));
  CHECK_THROWS_AS(Config::load(folder / "deep.yaml"), UsageError);
  write_file(folder / "big.yaml", fmt::format("a: {:x<2000000}\n", ""));
  CHECK_THROWS_WITH(Config::load(folder / "big.yaml"), ContainsSubstring("larger than 1 MiB"));
}

TEST_CASE("a composed config can be read back", "[config]") {
  Config config = Config::parse("a: {b: 2, text: 'x: y', list: [p, q], on: true}\n", "here");
  int b = 0, c = 5;
  double d = 0.1;
  std::string text;
  std::vector<std::string> list;
  bool on = false;
  std::optional<std::int64_t> most;
  const auto read = [&](Config& from) {
    from.read("a.b", b);
    from.read("a.c", c);
    from.read("a.d", d);
    from.read("a.text", text);
    from.read("a.list", list);
    from.read("a.on", on);
    from.read("a.most", most, {.least = 1});
    from.check_all_known();
  };
  read(config);
  const std::string json = config.resolved();
  b = c = 0, d = 0, text.clear(), list.clear(), on = false, most = 3;
  Config again = Config::parse(json, "checkpoint");
  read(again);
  CHECK(b == 2);
  CHECK(c == 5);
  CHECK(d == 0.1);
  CHECK(text == "x: y");
  CHECK(list == std::vector<std::string>{"p", "q"});
  CHECK(on);
  CHECK_FALSE(most);
  CHECK(again.resolved() == json);
}
