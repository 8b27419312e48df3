#include <torch/torch.h>

#include <ddpkit/optim/fused_adam.h>

#include "gpt/model.h"
#include "support/program.h"

using ddpkit::testing::Arguments, ddpkit::testing::Folder, ddpkit::testing::joined, ddpkit::testing::Kill;
using ddpkit::testing::names_in, ddpkit::testing::ProgramRun, ddpkit::testing::same_bits, ddpkit::testing::write_file;

namespace {

ProgramRun run_gpt(int ranks, const Arguments& arguments, std::optional<Kill> kill = std::nullopt) {
  return ddpkit::testing::run_program(DDPKIT_TEST_GPT, ranks, arguments, kill);
}

/// Text in which each character follows from the ones before it.
const std::string& text() {
  static const Folder folder;
  static const std::string path = [] {
    std::string written;
    for (int i = 0; i < 60; ++i) written += "the cat sat on the mat, and the dog ran to the end of the road.\n";
    write_file(folder / "text", written);
    return (folder / "text").string();
  }();
  return path;
}

Arguments small(const Arguments& more, const char* epochs = "2") {
  return joined({"--data", text(), "--layers", "3", "--width", "16", "--heads", "2", "--context", "16", "--batch-size",
                 "8", "--epochs", epochs, "--lr", "1e-2", "--json", "--characters", "0"},
                more);
}

/// Reads the weights from the checkpoint of a run, sharded or not.
std::vector<at::Tensor> weights_of(const Folder& save_dir) {
  gpt::Gpt model({.tokens = 17, .layers = 3, .width = 16, .heads = 2, .context = 16});
  ddpkit::optim::FusedAdamW optimizer(model.parameters());
  ddpkit::train::read_checkpoint(save_dir / "checkpoint.pt", model, optimizer);
  return model.parameters();
}

std::vector<double> losses_of(const ProgramRun& run) {
  INFO(run.errors);
  REQUIRE(run.exit_code == 0);
  std::vector<double> losses;
  for (std::size_t line = 0; line + 1 < run.lines.size(); ++line)
    for (const char* key : {"train_loss", "validation_loss"}) losses.push_back(run.json(line)[key]);
  return losses;
}

void check_same(const std::vector<double>& losses, const std::vector<double>& expected) {
  REQUIRE(losses.size() == expected.size());
  for (std::size_t i = 0; i < losses.size(); ++i) CHECK(std::abs(losses[i] - expected[i]) < 1e-5 * expected[i]);
}

}  // namespace

TEST_CASE("gpt has the same losses whatever is sharded, and with activation checkpointing", "[gpt]") {
  const std::vector<double> expected = losses_of(run_gpt(2, small({})));
  REQUIRE(expected.size() == 4);
  CHECK(expected[2] < 0.8 * expected[0]);
  for (const char* sharding : {"zero2", "fsdp"}) {
    CAPTURE(sharding);
    check_same(losses_of(run_gpt(2, small({"--sharding", sharding}))), expected);
    check_same(losses_of(run_gpt(2, small({"--sharding", sharding, "--activation-checkpointing"}))), expected);
  }
}

TEST_CASE("gpt continues text that it has learned", "[gpt]") {
  for (const char* sharding : {"none", "fsdp"}) {
    CAPTURE(sharding);
    const ProgramRun run =
        run_gpt(2, {"--data",        text(), "--width",      "32",    "--context", "32",    "--epochs",     "40",
                    "--lr",          "1e-2", "--batch-size", "4",     "--prompt",  "the c", "--characters", "20",
                    "--temperature", "0",    "--sharding",   sharding});
    INFO(run.errors);
    REQUIRE(run.exit_code == 0);
    CHECK(std::find(run.lines.begin(), run.lines.end(), "the cat sat on the mat, a") != run.lines.end());
    CHECK(run.lines.back().starts_with("validation loss "));
  }
}

TEST_CASE("gpt: a run that was stopped and resumed ends with the bits of one that was not", "[gpt]") {
  for (const char* sharding : {"none", "fsdp"}) {
    CAPTURE(sharding);
    const Folder whole, parts;
    const auto with = [&](const Folder& folder, const Arguments& more) {
      return small(joined({"--sharding", sharding, "--dropout", "0.1", "--save-dir", folder.path()}, more));
    };
    REQUIRE(run_gpt(2, with(whole, {})).exit_code == 0);
    REQUIRE(run_gpt(2, with(parts, {"--save-steps", "1", "--max-steps", "18"})).exit_code == 0);
    CHECK(ddpkit::train::read_checkpoint_info(parts / "checkpoint.pt").step == 18);
    const ProgramRun resumed = run_gpt(2, with(parts, {}));
    INFO(resumed.errors);
    REQUIRE(resumed.exit_code == 0);
    CHECK(same_bits(weights_of(whole), weights_of(parts)));
    const bool has_shards = std::filesystem::exists(whole / "checkpoint.shards");
    CHECK(has_shards == (std::string(sharding) == "fsdp"));
    if (has_shards) CHECK(names_in(whole / "checkpoint.shards").size() == 2);
  }
}

TEST_CASE("gpt: a fully sharded run killed anywhere and started again ends with the bits of one never killed",
          "[gpt]") {
  const Folder whole, killed;
  const auto arguments = [&](const Folder& folder) {
    return small({"--sharding", "fsdp", "--save-steps", "1", "--save-dir", folder.path()}, "8");
  };
  const ProgramRun undisturbed = run_gpt(2, arguments(whole));
  INFO(undisturbed.errors);
  REQUIRE(undisturbed.exit_code == 0);
  const auto runs = ddpkit::testing::run_until_not_killed(
      2, undisturbed, [&](const Kill& kill) { return run_gpt(2, arguments(killed), kill); },
      [&] {
        if (std::filesystem::exists(killed / "checkpoint.pt")) CHECK(weights_of(killed).size() > 0);
      },
      killed / "checkpoint.pt");
  CHECK(runs.kills > 0);
  CHECK(same_bits(weights_of(whole), weights_of(killed)));
}

TEST_CASE("gpt resumes with other sharding, on another number of ranks", "[gpt]") {
  const Folder folder;
  const auto with = [&](const char* sharding, const char* steps) {
    return small({"--sharding", sharding, "--save-dir", folder.path(), "--save-steps", "1", "--max-steps", steps}, "8");
  };
  REQUIRE(run_gpt(3, with("fsdp", "4")).exit_code == 0);
  const struct {
    int ranks;
    const char *sharding, *steps;
  } parts[] = {{2, "fsdp", "6"}, {1, "none", "8"}, {2, "fsdp", "10"}, {2, "zero2", "12"}, {4, "fsdp", "14"}};
  std::vector<at::Tensor> before = weights_of(folder);
  for (const auto& part : parts) {
    CAPTURE(part.ranks, part.sharding, part.steps);
    const ProgramRun run = run_gpt(part.ranks, with(part.sharding, part.steps));
    INFO(run.errors);
    REQUIRE(run.exit_code == 0);
    CHECK(ddpkit::train::read_checkpoint_info(folder / "checkpoint.pt").step == std::stoi(part.steps));
    const std::vector<at::Tensor> after = weights_of(folder);
    for (std::size_t i = 0; i < after.size(); ++i) {
      const double moved = (after[i] - before[i]).abs().max().item<double>();
      CHECK(moved > 0);
      CHECK(moved < 0.1);  // Two steps of the learning rate 0.01.
    }
    before = after;
  }
}

TEST_CASE("gpt: wrong options and texts are named in one sentence", "[gpt]") {
  const Folder folder;
  write_file(folder / "short", "abc");
  const auto refuse = [](const Arguments& arguments, int code, const std::string& message,
                         const std::vector<int>& worlds = {1}) {
    ddpkit::testing::check_program_refuses(DDPKIT_TEST_GPT, arguments, code, message, worlds);
  };
  refuse({"--data", "/nonexistent"}, 1, "gpt: there is no text /nonexistent", {2});
  refuse({"--data", folder / "short"}, 1, "has 3 characters; --context 128 needs 1280 or more");
  refuse({"--data", text(), "--width", "10", "--heads", "4"}, 2, "--width 10 is no multiple of --heads 4");
  refuse({"--data", text(), "--sharding", "all"}, 2, "--sharding must be one of none, zero2, fsdp");
}
