// Speech recognition: Legendre Memory Units trained with CTC on one or several ranks. Trains, evaluates and
// transcribes.
#include <malloc.h>
#include <torch/cuda.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/comm/environment.h>
#include <ddpkit/launch/launcher.h>
#include <ddpkit/train/main.h>
#include <ddpkit/train/options.h>
#include <ddpkit/train/text.h>

#include "asr/check.h"
#include "asr/report.h"
#include "asr/trained_model.h"
#include "asr/trainer.h"
#include "asr/transcribe.h"

namespace {

using ddpkit::train::Config;
using ddpkit::train::number_between;
using ddpkit::train::rank_count;
using ddpkit::train::UsageError;
using ddpkit::train::whole_number;

struct CommandLine {
  std::string config;
  std::vector<std::string> overrides;
  std::string seed, save_dir, max_steps;  // Unparsed; Config checks them.
  bool json = false;
  std::string ranks;  // Number of ranks to start; empty: none.
  ddpkit::LaunchOptions launch = {.command = {}, .ranks = 0};
  std::vector<std::string> files;
  bool streaming = false;
  double piece_ms = 100;
};

void add_options(CLI::App& app, CommandLine& line) {
  app.get_formatter()->column_width(34);
  app.option_defaults()->always_capture_default();
  app.add_option("override", line.overrides, "Config keys, such as training.lr=2e-3")->type_name("KEY=VALUE");
  app.add_option("--config", line.config, "YAML file of options; see examples/asr/configs")->type_name("FILE");
  app.add_option("--seed", line.seed, "The same seed gives the same weights: training.seed")->type_name("N");
  app.add_option("--save-dir", line.save_dir, "Folder of the run's checkpoint: run.save_dir")->type_name("FOLDER");
  app.add_option("--max-steps", line.max_steps, "Stop after N optimizer steps: training.max_steps")->type_name("N");
  app.add_flag("--json", line.json, "Print one line of JSON per epoch; the last line is text: run.json");
  const std::string ranks = "Ranks";
  app.add_option("--spawn", line.ranks, "Ranks to start on this host: a number, gpu, cpu (cores), or auto")
      ->check(rank_count())
      ->type_name("N|gpu|cpu|auto")
      ->group(ranks);
  app.add_option("--nnodes", line.launch.nodes, "Number of hosts; each starts --spawn ranks")
      ->check(whole_number(1, 65536))
      ->type_name("N")
      ->group(ranks);
  app.add_option("--node-rank", line.launch.node_rank, "Index of this host, from 0")
      ->check(whole_number(0, 65535))
      ->type_name("N")
      ->group(ranks);
  app.add_option("--master-addr", line.launch.master_addr, "Address of host 0 for the rendezvous")
      ->type_name("HOST")
      ->group(ranks);
  app.add_option("--master-port", line.launch.master_port, "Port of the rendezvous; 0: a free port, for one host")
      ->check(whole_number(0, 65535))
      ->type_name("PORT")
      ->default_str("")
      ->group(ranks);
}

Config config_of(const CommandLine& line) {
  Config config = line.config.empty() ? Config() : Config::load(line.config);
  for (const std::string& assignment : line.overrides) config.override_with(assignment);
  if (!line.seed.empty()) config.set("training.seed", line.seed, "--seed");
  if (!line.save_dir.empty()) config.set("run.save_dir", line.save_dir, "--save-dir");
  if (!line.max_steps.empty()) config.set("training.max_steps", line.max_steps, "--max-steps");
  if (line.json) config.set("run.json", "true", "--json");
  return config;
}

// Starts this program once per rank, without --spawn.
int spawn(const CommandLine& line, int argc, char** argv) {
  ddpkit::LaunchOptions launch = line.launch;
  launch.ranks = ddpkit::train::count_ranks(line.ranks, static_cast<int>(torch::cuda::device_count()));
  launch.command = {std::filesystem::read_symlink("/proc/self/exe").string()};
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const std::string name = argument.substr(0, argument.find('='));
    const bool is_launch = name == "--spawn" || name == "--nnodes" || name == "--node-rank" ||
                           name == "--master-addr" || name == "--master-port";
    if (!is_launch) {
      launch.command.push_back(argument);
    } else if (name == argument) {
      ++i;  // Skips its value.
    }
  }
  launch.forward_signals = true;
  const ddpkit::LaunchResult result = ddpkit::launch(launch);
  // A rank that exited with an error code has already reported the error.
  if (result.first_failure && (result.first_failure->signal != 0 || result.first_failure->exit_code == 0))
    ddpkit::train::log_line(
        fmt::format("asr: rank {} {}", result.first_failure->rank, result.first_failure->describe()));
  return result.exit_code();
}

ddpkit::ProcessGroup join(ddpkit::train::Program& program, const asr::Options& options) {
  const int ranks = ddpkit::read_launch_environment().world_size;
  if (!options.distributed.enabled && ranks > 1)
    throw UsageError(fmt::format("distributed.enabled is false, but the launcher started {} ranks", ranks));
  return program.init_process_group({.backend = options.distributed.backend});
}

void transcribe_files(const CommandLine& line) {
  Config config = config_of(line);
  std::vector<std::string> files;
  for (const std::string& argument : line.files) {
    if (argument.starts_with("evaluation.") && argument.find('=') != std::string::npos)
      config.override_with(argument);
    else
      files.push_back(argument);
  }
  const asr::Options given = asr::read_options(config);
  const asr::TrainedModel trained = asr::load_model(given.run.save_dir);
  asr::Options options = trained.options;
  options.evaluation = given.evaluation;
  for (const std::string& file : files) {
    const std::string before = files.size() > 1 ? file + ": " : "";
    if (!line.streaming) {
      ddpkit::train::print_line(before + asr::transcribe(*trained.model, options, file));
      continue;
    }
    fmt::print("{}", before);
    asr::transcribe_stream(*trained.model, options, file, line.piece_ms, [](double, const std::string& text) {
      fmt::print("{}", text);
      std::fflush(stdout);
    });
    ddpkit::train::print_line("");
  }
}

void evaluate_sets(const CommandLine& line, ddpkit::train::Program& program) {
  Config config = config_of(line);
  const asr::Options options = asr::read_options(config);
  const ddpkit::ProcessGroup group = join(program, options);
  asr::evaluate_run(options, group);
}

/// Each batch has another length, so freed blocks rarely fit the next batch. glibc keeps freed blocks of up to 32 MiB
/// on its heap, and would hold almost twice the memory of the largest batch. With this setting, malloc maps each block
/// from 1 MiB on separately and returns it to the system.
void give_large_blocks_back() {
#if defined(__GLIBC__)
  ::mallopt(M_MMAP_THRESHOLD, 1 << 20);
#endif
}

}  // namespace

int main(int argc, char** argv) {
  give_large_blocks_back();
  CLI::App app(
      "Speech recognition: Legendre Memory Units trained with CTC. Runs on one rank, or on several with a launcher or "
      "--spawn.",
      "asr");
  CommandLine line;
  add_options(app, line);
  CLI::App* train = app.add_subcommand("train", "Train a model (the default command)")->fallthrough();
  CLI::App* evaluate =
      app.add_subcommand("evaluate", "Error rates of a run's model on data.dev and data.test")->fallthrough();
  CLI::App* check = app.add_subcommand("check", "Test the distributed set-up")->fallthrough();
  CLI::App* transcribe = app.add_subcommand("transcribe", "Transcribe recordings")->fallthrough();
  transcribe->add_option("file", line.files, "Recordings, and KEY=VALUE of evaluation")->required()->type_name("FILE");
  transcribe->add_flag("--streaming", line.streaming, "Transcribe as a stream, with the recurrent form");
  transcribe->add_option("--piece-ms", line.piece_ms, "Length of a streamed piece of sound")
      ->check(number_between(1.0, 1e6))
      ->type_name("MS");
  app.require_subcommand(0, 1);
  int exit_code = 0;
  const int code = ddpkit::train::run_main(app, argc, argv, [&](ddpkit::train::Program& program) {
    if (!line.ranks.empty()) {
      if (ddpkit::read_launch_environment().launcher != "none")
        throw UsageError("--spawn cannot be used under a launcher, which has already started the ranks");
      exit_code = spawn(line, argc, argv);
      return;
    }
    if (line.launch.nodes > 1) throw UsageError("--nnodes needs --spawn N: the ranks on each host");
    if (transcribe->parsed()) return transcribe_files(line);
    if (evaluate->parsed()) return evaluate_sets(line, program);
    Config config = config_of(line);
    const asr::Options options = asr::read_options(config);
    const ddpkit::ProcessGroup group = join(program, options);
    if (check->parsed()) return asr::check(group);
    asr::train(options, config.resolved(), group);
  });
  static_cast<void>(train);
  return code != 0 ? code : exit_code;
}
