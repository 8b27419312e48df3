// The first commands of a reader: without data, with the names of torchrun and of Python's trainers.
#include <ddpkit/launch/launcher.h>

#include "support/catch.h"
#include "support/folder.h"
#include "video/generate.h"

using ddpkit::testing::Folder;

namespace {

struct Output {
  int exit_code = -1;
  std::string text;  ///< stdout and stderr.

  std::size_t count(const std::string& words) const {
    std::size_t found = 0;
    for (std::size_t at = text.find(words); at != std::string::npos; at = text.find(words, at + 1)) ++found;
    return found;
  }
};

/// Runs a program in `folder`, without a launcher.
Output run_in(const std::filesystem::path& folder, std::vector<std::string> command) {
  const std::string script =
      "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID; cd \"$0\"; "
      "exec \"$@\" 2>&1";
  command.insert(command.begin(), {"sh", "-c", script, folder.string()});
  Output output;
  const auto result = ddpkit::launch({.command = command,
                                      .ranks = 1,
                                      .environment = {{"OMP_NUM_THREADS", "1"}, {"CUDA_VISIBLE_DEVICES", ""}},
                                      .time_limit = std::chrono::seconds(300),
                                      .on_output = [&](int, const std::string& text) { output.text += text; }});
  output.exit_code = result.exit_code();
  return output;
}

}  // namespace

TEST_CASE("a trainer without --data generates a data set once, also on ranks that it starts", "[guides]") {
  const Folder folder;
  const std::vector<std::pair<std::vector<std::string>, std::string>> trainers = {
      {{DDPKIT_TEST_HAR, "train", "--epochs", "1"}, "data/har"},
      {{DDPKIT_TEST_CLSTM_PPO, "--num_episodes", "16", "--envs", "8", "--num_gpus", "0"}, "data/planted"}};
  for (const auto& [command, data] : trainers) {
    CAPTURE(command);
    for (const char* ranks : {"2", "1"}) {
      std::vector<std::string> all = command;
      all.insert(all.end(), {"--nproc_per_node", ranks});
      const Output run = run_in(folder.path(), all);
      INFO(run.text);
      CHECK(run.exit_code == 0);
      CHECK(run.count("there is no " + data + ": generating") == (ranks == std::string("2") ? 1 : 0));
      CHECK(run.count("\ntest ") == 1);  // Rank 0 prints the result.
    }
    CHECK(std::filesystem::is_directory(folder / data));
  }
}

TEST_CASE("video without --data trains on data/mouse", "[guides]") {
  const Folder folder;
  std::filesystem::create_directory(folder / "data");
  video::generate(folder / "data/mouse", {.videos = 6, .trials = 60, .least_of_class = 2, .size = {32, 32}});
  const Output run = run_in(folder.path(), {DDPKIT_TEST_VIDEO, "train", "--nproc-per-node", "2", "--epochs", "1",
                                            "--size", "32", "--width", "2", "--check", "index"});
  INFO(run.text);
  CHECK(run.exit_code == 0);
  CHECK(run.count("\nbest macro F1 ") == 1);
}

TEST_CASE("asr without data names the script that fetches them", "[guides]") {
  const Folder folder;
  const Output run = run_in(folder.path(), {DDPKIT_TEST_ASR, "--nproc-per-node", "2"});
  CHECK(run.exit_code == 2);
  CHECK(run.count("there is no data/speech; script/data speech fetches it") == 1);
}

TEST_CASE("a launcher that started another number of ranks than asked for is an error", "[guides]") {
  const Folder folder;
  const Output run =
      run_in(folder.path(), {DDPKIT_TEST_DDPKIT, "run", "-n", "2", "--", DDPKIT_TEST_HAR, "--nproc-per-node", "3"});
  CHECK(run.exit_code == 2);
  CHECK(run.count("--nproc-per-node asks for 3 ranks, but the launcher started 2 on this host") > 0);
}
