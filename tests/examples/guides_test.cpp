// The first commands of a reader: without data, with the names of torchrun and of Python's trainers.
#include <ddpkit/launch/launcher.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ddpkit/comm/environment.h>

#include "clstm_ppo/generate.h"
#include "har/generate.h"
#include "support/catch.h"
#include "support/folder.h"
#include "support/sound.h"
#include "video/generate.h"

using ddpkit::testing::Folder;
using ddpkit::testing::read_file;

namespace {

struct Output {
  int exit_code = -1;
  std::string text;    ///< stdout.
  std::string errors;  ///< stderr.

  std::size_t count(const std::string& words) const {
    const std::string all = text + errors;
    std::size_t found = 0;
    for (std::size_t at = all.find(words); at != std::string::npos; at = all.find(words, at + 1)) ++found;
    return found;
  }
};

/// Runs a program in `folder`, without a launcher.
Output run_in(const std::filesystem::path& folder, std::vector<std::string> command) {
  const std::string script =
      "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID; cd \"$0\"; "
      "exec \"$@\" 2>errors";
  command.insert(command.begin(), {"sh", "-c", script, folder.string()});
  Output output;
  const auto result = ddpkit::launch({.command = command,
                                      .ranks = 1,
                                      .environment = {{"OMP_NUM_THREADS", "1"},
                                                      {"CUDA_VISIBLE_DEVICES", ""},
                                                      {"LC_ALL", "C"},
                                                      {"VIDEO", DDPKIT_TEST_VIDEO}},
                                      .time_limit = std::chrono::seconds(300),
                                      .on_output = [&](int, const std::string& text) { output.text += text; }});
  output.exit_code = result.exit_code();
  output.errors = read_file(folder / "errors");
  return output;
}

/// Checks that each line matches the next pattern. A pattern that begins with '*' matches one line or several.
void check_lines(const std::string& text, const std::vector<std::string>& patterns) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  std::size_t next = 0;
  for (const std::string& pattern : patterns) {
    const bool repeats = pattern.starts_with("*");
    const std::regex expected(repeats ? pattern.substr(1) : pattern);
    INFO(text << "\nexpected: " << pattern << "\nfound: " << (next < lines.size() ? lines[next] : "the end"));
    REQUIRE(next < lines.size());
    REQUIRE(std::regex_match(lines[next], expected));
    ++next;
    while (repeats && next < lines.size() && std::regex_match(lines[next], expected)) ++next;
  }
  INFO(text);
  CHECK(next == lines.size());
}

/// The first lines of a run on CPU ranks.
std::vector<std::string> first_lines(int ranks) {
  return {fmt::format("Distributed training: {} CPU rank\\(s\\)", ranks), "Using device: cpu", "Loading data\\.\\.\\."};
}

/// The line of the effective batch size. `batch`: in front of "per rank".
std::string batch_line(int ranks, const std::string& all, const std::string& batch) {
  return fmt::format("Effective batch size: {} \\({} per rank x {} rank{}\\)", all, batch, ranks,
                     ranks == 1 ? "" : "s");
}

/// The line of the model, and the last line before the epochs. `rest`: between the size and the precision.
std::vector<std::string> model_lines(const std::string& name, const std::string& rest) {
  return {name + ": [0-9.]+[kM] parameters \\([0-9.]+ MB\\), " + rest +
              ", mixed precision (off|bfloat16), backend shm, saving to runs",
          "Starting training\\.\\.\\."};
}

/// The last lines. `epochs`: "2 epochs"; `unit`: of the rate; `result`: the very last line.
std::vector<std::string> last_lines(int ranks, const std::string& epochs, const std::string& unit,
                                    const std::string& files, const std::string& result) {
  return {fmt::format("Training finished: {}, [0-9]+ updates in [0-9]+:[0-9]+ \\([0-9.]+ {}/s\\)", epochs, unit),
          ranks == 1 ? "Peak memory: rank 0 [0-9]+ MB" : "Peak memory: rank 0 [0-9]+ MB, rank 1 [0-9]+ MB",
          "Files: runs/\\{" + files + "\\}", result};
}

std::vector<std::string> joined(const std::vector<std::vector<std::string>>& parts) {
  std::vector<std::string> all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

/// Runs `command` twice in new run folders of `folder`: on one rank and on two that the program starts. Checks the
/// lines on stdout and that stderr has the banner and no error.
void check_console(const Folder& folder, const std::vector<std::string>& command,
                   const std::function<std::vector<std::string>(int ranks)>& expected) {
  for (const int ranks : {1, 2}) {
    CAPTURE(command, ranks);
    std::filesystem::remove_all(folder / "runs");
    const Output run =
        run_in(folder.path(), joined({command, {"--save-dir", "runs", "--nproc-per-node", std::to_string(ranks)}}));
    INFO(run.text << run.errors);
    REQUIRE(run.exit_code == 0);
    check_lines(run.text, expected(ranks));
    const std::string line = std::string(42, '=') + "\n";
    CHECK(run.errors == fmt::format("{0}Multi-GPU Training Launcher\n{0}Number of ranks: {1} (CPU)\nLaunching "
                                    "distributed training...\n",
                                    line, ranks));
  }
}

/// Writes 12 recordings of two words, with the manifests of script/data speech.
void write_speech(const std::filesystem::path& folder) {
  std::string manifest;
  for (int i = 0; i < 12; ++i) {
    const std::string text = i % 2 == 0 ? "abc" : "deab";
    ddpkit::testing::write_sound(folder / fmt::format("{}.wav", i), ddpkit::testing::spoken(text));
    manifest += nlohmann::json{{"audio_filepath", fmt::format("{}.wav", i)}, {"text", text}}.dump() + "\n";
  }
  for (const char* name : {"train.jsonl", "dev.jsonl"}) ddpkit::testing::write_file(folder / name, manifest);
}

/// Options of a small model of asr, as YAML.
const std::vector<std::string> kSmallSpeech = {
    "features.sample_rate: 8000", "features.mels: 24", "model.width: 32", "model.strides: [2, 1]", "model.layers: 2",
    "model.memory_channels: 4",   "model.order: 6",    "model.theta: 12"};

constexpr const char* kNumber = "-?[0-9.]+";

}  // namespace

TEST_CASE("a trainer without --data generates a data set once, also on ranks that it starts", "[guides]") {
  const Folder folder;
  const std::vector<std::pair<std::vector<std::string>, std::string>> trainers = {
      {{DDPKIT_TEST_HAR, "train", "--epochs", "1"}, "data/har"},
      {{DDPKIT_TEST_CLSTM_PPO, "--num_episodes", "16", "--envs", "8", "--num_gpus", "0"}, "data/planted"}};
  for (const auto& [command, data] : trainers) {
    CAPTURE(command);
    for (const char* ranks : {"2", "1"}) {
      const Output run = run_in(folder.path(), joined({command, {"--nproc_per_node", ranks}}));
      INFO(run.text << run.errors);
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
  INFO(run.text << run.errors);
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

TEST_CASE("the console of har", "[guides]") {
  const Folder folder;
  har::generate_ucihar(folder / "data/har", {.train = 120, .test = 61, .steps = 32});
  check_console(folder, {DDPKIT_TEST_HAR, "--epochs", "2", "--batch-size", "16"}, [](int ranks) {
    const std::string part = fmt::format("Loss: {0}, Acc: {0}%", kNumber);
    return joined(
        {first_lines(ranks),
         {"har: 120 training and 61 test windows, 9 channels x 32 steps, 6 classes",
          fmt::format("Train batches: 8 \\(per rank: ~{}\\)", 8 / ranks),
          fmt::format("Test batches: {} \\(per rank: ~1\\)", ranks),
          batch_line(ranks, std::to_string(16 * ranks), "16"), "Creating model\\.\\.\\."},
         model_lines("cnn", "adamw, lr 0\\.001"),
         {fmt::format("*Epoch [12]/2 - Train {0} \\| Test {0}, F1: {1} \\| {1} s, [0-9]+ samples/s", part, kNumber),
          "class .* F1 .*", "*[A-Z_]+( +[0-9]+){6} +[0-9.]+", fmt::format("macro F1 {}", kNumber)},
         last_lines(ranks, "2 epochs", "samples",
                    "checkpoint\\.pt, config\\.yaml, confusion\\.svg, curves\\.svg, logs/, metrics\\.csv",
                    "test accuracy [0-9.]+ %")});
  });
}

TEST_CASE("the console of video", "[guides]") {
  const Folder folder;
  std::filesystem::create_directory(folder / "data");
  video::generate(folder / "data/mouse", {.videos = 6, .trials = 60, .least_of_class = 2, .size = {32, 32}});
  check_console(
      folder, {DDPKIT_TEST_VIDEO, "train", "--epochs", "2", "--size", "32", "--width", "2", "--check", "index"},
      [](int ranks) {
        const std::string part = fmt::format("Loss: {0}, Acc: {0}%", kNumber);
        return joined({first_lines(ranks),
                       {"Found 6 unique videos with 60 total trials", "Train trials: 50, Val trials: 10", "={60}",
                        "Class Distribution and Weights", "={60}",
                        "*Class [0-7] \\([a-z_]+ *\\): +[0-9]+ samples \\( *[0-9.]+%\\) -> weight: [0-9.]+", "={60}",
                        fmt::format("Train batches: {} \\(per rank: ~{}\\)", ranks == 1 ? 7 : 8, ranks == 1 ? 7 : 4),
                        fmt::format("Val batches: 2 \\(per rank: ~{}\\)", 2 / ranks),
                        batch_line(ranks, std::to_string(8 * ranks), "8"), "Creating model\\.\\.\\."},
                       model_lines("3D-CNN", "adamw, lr 0\\.001"),
                       {fmt::format("Epoch 1/2 - Train {0} \\| Val {0}, F1: {1} \\| {1} s, {1} clips/s, waited [0-9]+%",
                                    part, kNumber),
                        fmt::format("  \\* Saved best model: best_model_epoch[01]\\.pt \\(F1: {}\\)", kNumber),
                        "*Epoch 2/2 - .*|  \\* Saved .*", "class .* F1 .*", "*[a-z_]+( +[0-9]+){8} +[0-9.]+",
                        fmt::format("macro F1 {}", kNumber)},
                       last_lines(ranks, "2 epochs", "clips",
                                  "best\\.pt, best_model_epoch[01]\\.pt, checkpoint\\.pt, config\\.yaml, "
                                  "confusion\\.svg, curves\\.svg, logs/, "
                                  "metrics\\.csv",
                                  fmt::format("best macro F1 {} \\(epoch [12]\\)", kNumber))});
      });
}

TEST_CASE("the console of asr", "[guides]") {
  const Folder folder;
  write_speech(folder / "data/speech");
  check_console(
      folder,
      {DDPKIT_TEST_ASR, "--epochs", "2", "training.batch_size=4", "features.sample_rate=8000", "features.mels=24",
       "model.width=32", "model.strides=[2, 1]", "model.layers=2", "model.memory_channels=4", "model.order=6",
       "model.theta=12", "evaluation.samples=1"},
      [](int ranks) {
        return joined(
            {first_lines(ranks),
             {"Creating model\\.\\.\\.", fmt::format("Train utterances: 12 \\({} min\\), dev utterances: 12", kNumber),
              "Train batches: 3", batch_line(ranks, "4", std::to_string(4 / ranks))},
             model_lines("LMU", ranks == 1 ? "adamw, lr 0\\.001" : "adamw, lr 0\\.002 \\(0\\.001 x 2, linear\\)"),
             {fmt::format("*Epoch [12]/2 - Train Loss: {0} \\| Dev Loss: {0}, CER: {0}%, WER: {0}% \\| {0} s, {0} "
                          "s/batch, [0-9]+x real time, waited [0-9]+%",
                          kNumber),
              "[0-9]+\\.wav", "  reference:  [a-e]+", "  hypothesis: .*"},
             last_lines(ranks, "2 epochs", "utterances",
                        "checkpoint\\.pt, config\\.yaml, curves\\.svg, logs/, metrics\\.csv", "no file skipped")});
      });
}

TEST_CASE("the console of clstm_ppo", "[guides]") {
  const Folder folder;
  clstm_ppo::generate(folder / "data/planted", {.assets = 2, .days = 500});
  check_console(
      folder,
      {DDPKIT_TEST_CLSTM_PPO, "--num_episodes", "16", "--envs", "4", "--episode-steps", "16", "--sequence", "8",
       "--window", "6", "--batch_size", "16", "--hidden", "8", "--grad_accum_steps", "2"},
      [](int ranks) {
        const int rounds = 4 / ranks;
        return joined(
            {first_lines(ranks),
             {"PLANTED1, PLANTED2: [0-9]+ days of training to [0-9-]+, [0-9]+ unseen days to [0-9-]+",
              fmt::format("Rounds: {} of {} episodes \\(4 per rank x {} rank{}\\)", rounds, 4 * ranks, ranks,
                          ranks == 1 ? "" : "s"),
              batch_line(ranks, fmt::format("{} days", 32 * ranks), "16 x 2 steps"), "Creating model\\.\\.\\."},
             model_lines("cascaded LSTM", "adam, lr 0\\.002"),
             {fmt::format(
                  "*Round [1-4]/{0} - Episodes: [0-9]+/16, Return: [+-]{1}%, Sharpe: [+-]{1}, Drawdown: {1}% \\| "
                  "Policy Loss: -?{1}, Value Loss: {1} \\| {1} s, {1} episodes/s",
                  rounds, "[0-9.]+"),
              "unseen, [0-9]+ days .*", "policy .*", "buy and hold .*", "best with the pattern .*",
              "the policy earns .*"},
             last_lines(ranks, fmt::format("{} rounds", rounds), "episodes",
                        "checkpoint\\.pt, config\\.yaml, curves\\.svg, equity\\.svg, logs/, metrics\\.csv",
                        "test return [+-][0-9.]+ %")});
      });
}

TEST_CASE("the commands of the guides run as printed", "[guides]") {
  const Folder folder;
  har::generate_ucihar(folder / "data/har", {.train = 120, .test = 61, .steps = 32});
  video::generate(folder / "data/mouse", {.videos = 6, .trials = 60, .least_of_class = 2, .size = {32, 32}});
  clstm_ppo::generate(folder / "data/planted", {.assets = 2, .days = 500});
  write_speech(folder / "data/speech");
  // A config makes the runs short. All options of the commands stay.
  ddpkit::testing::write_file(folder / "har.yaml", "max_steps: 2\n");
  ddpkit::testing::write_file(folder / "video.yaml", "{max_steps: 2, size: 32, width: 2, check: index}\n");
  ddpkit::testing::write_file(folder / "clstm_ppo.yaml", "{max_steps: 2, envs: 2, hidden: 8}\n");
  ddpkit::testing::write_file(folder / "asr.yaml",
                              fmt::format("{{max_steps: 2, {}}}\n", fmt::join(kSmallSpeech, ", ")));
  const std::string script = DDPKIT_TEST_VIDEO_FOLDER "/train_multigpu.sh";
  const std::vector<std::string> har = {DDPKIT_TEST_HAR}, video = {DDPKIT_TEST_VIDEO}, asr = {DDPKIT_TEST_ASR},
                                 clstm_ppo = {DDPKIT_TEST_CLSTM_PPO};
  struct Command {
    std::vector<std::string> words;
    std::string config;
    int ranks;
  };
  const std::vector<Command> commands = {
      {har, "har", 1},
      {joined({har, {"--multi-gpu", "none"}}), "har", 1},
      {joined({har, {"--multi-gpu", "dp", "--epochs", "20", "--batch-size", "32"}}), "har", 1},
      {joined({har, {"--multi-gpu", "ddp", "--nproc-per-node", "2", "--epochs", "20"}}), "har", 2},
      {joined({har, {"--grad-accum-steps", "4", "--warmup-epochs", "5", "--lr-scaling", "linear"}}), "har", 1},
      {video, "video", 1},
      {joined({video, {"--nproc_per_node=2"}}), "video", 2},
      {{script, "2"}, "video", 2},
      {joined({clstm_ppo, {"--num_gpus", "-1", "--num_episodes", "5000", "--batch_size", "128"}}), "clstm_ppo", 1},
      {joined({clstm_ppo, {"--num_gpus=0", "--nproc_per_node=2"}}), "clstm_ppo", 2},
      {asr, "asr", 1},
      {joined({asr, {"--num-gpus", "-1"}}), "asr", 1},
      {joined({asr, {"--spawn", "2", "training.batch_size=4", "training.lr=2e-3"}}), "asr", 2}};
  for (const Command& command : commands) {
    CAPTURE(command.words);
    const Output run = run_in(folder.path(), joined({command.words, {"--config", command.config + ".yaml"}}));
    INFO(run.text << run.errors);
    CHECK(run.exit_code == 0);
    CHECK(run.count("Training finished: ") == 1);
    CHECK(run.count(fmt::format("saving to checkpoints/{}/run-", command.config)) == 1);
    // DataParallel on the CPU has a replica per core.
    const bool is_dp = std::find(command.words.begin(), command.words.end(), "dp") != command.words.end();
    CHECK(run.text.starts_with(
        fmt::format("Distributed training: {} CPU ", is_dp ? ddpkit::available_cores() : command.ranks)));
  }
  for (const char* ranks : {"1", "2"}) {
    const Output check = run_in(folder.path(), joined({asr, {"check", "--nproc-per-node", ranks}}));
    CHECK(check.exit_code == 0);
    CHECK(check.count("the distributed set-up works") == 1);
  }
}

TEST_CASE("each run without --save-dir gets its own folder", "[guides]") {
  const Folder folder;
  har::generate_ucihar(folder / "data/har", {.train = 40, .test = 12, .steps = 32});
  const auto run = [&](const std::vector<std::string>& more) {
    const Output output = run_in(folder.path(), joined({{DDPKIT_TEST_HAR, "--epochs", "1"}, more}));
    INFO(output.text << output.errors);
    CHECK(output.exit_code == 0);
    return output;
  };
  const std::filesystem::path runs = folder / "checkpoints/har";
  CHECK(run({"--no-save"}).count("without checkpoints") == 1);
  CHECK_FALSE(std::filesystem::exists(folder / "checkpoints"));
  CHECK(run({}).count("saving to checkpoints/har/run-1") == 1);
  CHECK(run({"--lr", "0.01", "--nproc-per-node", "2"}).count("\nFiles: checkpoints/har/run-2/{checkpoint.pt, ") == 1);
  const std::string first = read_file(runs / "run-1/checkpoint.pt"), second = read_file(runs / "run-2/checkpoint.pt");
  // The last run is complete: there is nothing to train.
  CHECK(run({"--lr", "0.01", "--resume"}).count("resumed from checkpoints/har/run-2/checkpoint.pt, epoch 1") == 1);
  CHECK(run({"--config", "checkpoints/har/run-1/config.yaml"}).count("resumed from checkpoints/har/run-1") == 1);
  CHECK(read_file(runs / "run-1/checkpoint.pt") == first);
  CHECK(read_file(runs / "run-2/checkpoint.pt") == second);
  CHECK(ddpkit::testing::names_in(runs) == std::vector<std::string>{"run-1", "run-2"});
}

TEST_CASE("a training that is killed or stopped ends with the option that resumes it", "[guides]") {
  const Folder folder;
  har::generate_ucihar(folder / "data/har", {.train = 40, .test = 12, .steps = 32});
  // Signals rank 1, a child of the launching program, when there is a checkpoint.
  const std::string script =
      "signal=$1; shift; \"$@\" & launcher=$!; until [ -e checkpoints/har/run-1/checkpoint.pt ]; do sleep 0.05; "
      "kill -0 $launcher || exit; done; read -r first second rest </proc/$launcher/task/$launcher/children; kill "
      "-$signal $second; wait $launcher";
  for (const auto& [signal, code, last] :
       {std::tuple{"KILL", 137, "har: resume with --save-dir checkpoints/har/run-1 \\(epoch [0-9]+, step [0-9]+\\)"},
        std::tuple{"TERM", 0,
                   "har: stopped by SIGTERM after step [0-9]+; resume with --save-dir checkpoints/har/run-1"}}) {
    CAPTURE(signal);
    std::filesystem::remove_all(folder / "checkpoints");
    const Output run = run_in(folder.path(), {"sh", "-c", script, "sh", signal, DDPKIT_TEST_HAR, "--epochs", "1000000",
                                              "--nproc-per-node", "2"});
    INFO(run.errors);
    CHECK(run.exit_code == code);
    std::vector<std::string> lines;
    std::istringstream stream(run.errors);
    for (std::string line; std::getline(stream, line);) lines.push_back(line);
    REQUIRE_FALSE(lines.empty());
    CHECK(std::regex_match(lines.back(), std::regex(last)));
    CHECK(run.count("resume with") == 1);
  }
  const Output resumed = run_in(
      folder.path(), {DDPKIT_TEST_HAR, "--epochs", "1000000", "--max-steps", "1", "--resume", "--nproc-per-node", "2"});
  INFO(resumed.text << resumed.errors);
  CHECK(resumed.exit_code == 0);
  CHECK(resumed.count("\nresumed from checkpoints/har/run-1/checkpoint.pt, epoch ") == 1);
}
