#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <optional>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/launch/launcher.h>
#include <ddpkit/parse_number.h>
#include <ddpkit/train/options.h>

#include "commands.h"
#include "doctor/gpus.h"
#include "environment_number.h"

namespace ddpkit::cli {
namespace {

/// torchrun's default port, for launches on several hosts.
constexpr int kPortOfSeveralHosts = 29500;

struct RunOptions {
  std::string ranks = "1";  ///< Format of train::count_ranks().
  int nodes = 1;
  int node_rank = 0;
  std::string master_addr = {};
  std::optional<int> master_port = std::nullopt;  ///< 0: a free port.
  bool standalone = false;
  int max_restarts = 0;
  std::string log_dir = {};
  int tee = 3;
  double grace_seconds = 30;
  NumaBinding numa_binding = NumaBinding::kNode;
};

/// Returns the number of GPUs that the ranks will see.
int visible_gpus() {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  const auto all = static_cast<int>(read_gpus().gpus.size());
  if (!visible) return all;
  const std::string list = visible;
  return list.empty() ? 0 : std::min<int>(all, static_cast<int>(std::count(list.begin(), list.end(), ',')) + 1);
}

LaunchOptions resolve(const RunOptions& options, const std::vector<std::string>& program) {
  LaunchOptions launch{
      .command = program, .ranks = train::count_ranks(options.ranks, visible_gpus()), .nodes = options.nodes};
  launch.node_rank = options.node_rank;
  launch.max_restarts = options.max_restarts;
  launch.numa_binding = options.numa_binding;
  launch.signal_grace = std::chrono::milliseconds(static_cast<std::int64_t>(options.grace_seconds * 1000));
  launch.grace = std::min(launch.grace, launch.signal_grace);
  launch.log_dir = options.log_dir;
  launch.show_stdout = options.tee & 1;
  launch.show_stderr = options.tee & 2;
  launch.forward_signals = true;
  const bool one_host = options.nodes == 1;
  if (options.master_port) {
    launch.master_port = *options.master_port;
  } else if (!options.standalone) {
    launch.master_port = number_from_environment("MASTER_PORT", 0, 65535, one_host ? 0 : kPortOfSeveralHosts);
  }
  if (one_host) {
    if (!options.master_addr.empty()) launch.master_addr = options.master_addr;
    return launch;
  }
  if (launch.master_port == 0)
    throw InvalidArgument(
        "--master-port 0 (or MASTER_PORT) is for one host: with --nnodes above 1 all hosts need the same port");
  const char* address = std::getenv("MASTER_ADDR");
  launch.master_addr = !options.master_addr.empty() ? options.master_addr : address ? address : "";
  if (launch.master_addr.empty())
    throw InvalidArgument("--nnodes above 1 needs --master-addr (or MASTER_ADDR): the host that has --node-rank 0");
  // Each launcher watches only the ranks of its host, so the hosts would not restart together.
  if (options.max_restarts > 0)
    throw InvalidArgument(
        "--max-restarts is for one host: with --nnodes above 1 let the scheduler restart the job (Slurm "
        "--requeue, Kubernetes restartPolicy); the trainers resume from their last checkpoint");
  if (options.node_rank >= options.nodes)
    throw InvalidArgument(fmt::format("--node-rank {} is not below --nnodes {}", options.node_rank, options.nodes));
  return launch;
}

int run_ranks(const RunOptions& options, const std::vector<std::string>& program) {
  LaunchOptions launch = resolve(options, program);
  for (;; ++launch.restart_count) {
    const LaunchResult result = ddpkit::launch(launch);
    if (result.first_failure) std::cerr << "ddpkit run: " << result.summary();
    if (result.exit_code() == 0 || result.stopped_by_signal != 0) return result.exit_code();
    if (launch.restart_count == launch.max_restarts) {
      if (launch.max_restarts > 0)
        std::cerr << fmt::format("ddpkit run: all {} restarts are used up\n", launch.max_restarts);
      return result.exit_code();
    }
    std::cerr << fmt::format("ddpkit run: restarting all ranks (restart {} of {})\n", launch.restart_count + 1,
                             launch.max_restarts);
  }
}

}  // namespace

void add_run(CLI::App& app, const std::vector<std::string>& program, std::function<int()>& run) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* command = app.add_subcommand("run", "Start a program on several ranks of this host");
  command->footer(
      "Usage: ddpkit run -n N [OPTIONS] [--] PROGRAM [ARGS...]\n\n"
      "Options are torchrun's, with dashes or underscores. Sets RANK, LOCAL_RANK, GROUP_RANK, WORLD_SIZE,\n"
      "LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT,\n"
      "TORCHELASTIC_MAX_RESTARTS, and OMP_NUM_THREADS (cores / N) if it is not set.\n\n"
      "Rank 0's output is unchanged. The lines of the other ranks go to stderr, prefixed with \"[rank N] \".\n"
      "If a rank fails, the launcher ends the other ranks and exits with the rank's exit code, or 128 + signal.\n"
      "Forwards SIGINT and SIGTERM, and SIGHUP as SIGTERM. A second signal kills the ranks.\n"
      "SIGUSR1 prints what each rank is doing.");
  command->add_option("-n,--nproc-per-node", options->ranks, "Ranks to start: a number, gpu, cpu (cores), or auto")
      ->required()
      ->check(train::rank_count())
      ->type_name("N|gpu|cpu");
  command->add_option("--nnodes", options->nodes, "Number of hosts; each runs one launcher")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--node-rank", options->node_rank, "Index of this host")
      ->check(CLI::Range(0, 4095))
      ->capture_default_str()
      ->type_name("N");
  CLI::Option* master_addr =
      command->add_option("--master-addr", options->master_addr, "Host of rank 0")->type_name("HOST");
  CLI::Option* master_port =
      command
          ->add_option("--master-port", options->master_port,
                       "Rendezvous port, 0: a free port (default: MASTER_PORT, or a free port; 29500 for "
                       "several hosts)")
          ->check(CLI::Range(0, 65535))
          ->type_name("PORT");
  command->add_flag("--standalone", options->standalone, "One host and a free port; ignores the environment")
      ->excludes(master_addr)
      ->excludes(master_port)
      ->excludes("--nnodes");
  command
      ->add_option("--max-restarts", options->max_restarts, "Maximum number of restarts of all ranks after a failure")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str()
      ->type_name("N");
  CLI::Option* log_dir = command
                             ->add_option("--log-dir", options->log_dir,
                                          "Folder for each rank's output: attempt_A/RANK/{stdout,stderr}.log, and "
                                          "collectives.txt, its last 256 collectives; A increases with each start")
                             ->type_name("FOLDER");
  command->add_option("--tee", options->tee, "With --log-dir, also print: 0 nothing, 1 stdout, 2 stderr, 3 both")
      ->needs(log_dir)
      ->check(CLI::Range(0, 3))
      ->capture_default_str()
      ->type_name("0..3");
  command
      ->add_option("--grace-seconds", options->grace_seconds,
                   "Time for the ranks to end after SIGINT or SIGTERM before they are killed")
      ->check(train::number_between(0, 86400))
      ->capture_default_str()
      ->type_name("S");
  const std::map<std::string, NumaBinding> bindings{
      {"none", NumaBinding::kNone}, {"node", NumaBinding::kNode}, {"exclusive", NumaBinding::kExclusive}};
  command
      ->add_option("--numa-binding", options->numa_binding,
                   "Cores of a rank: those of one NUMA node (node), a separate part of a node (exclusive), all (none)")
      ->transform(CLI::CheckedTransformer(bindings).description(""))
      ->default_str("node")
      ->type_name("none|node|exclusive");
  command->callback([options, &program, &run] {
    if (program.empty()) throw CLI::ValidationError("run", "there is no program to start");
    run = [options, program] { return run_ranks(*options, program); };
  });
}

std::vector<std::string> split_program(const CLI::App& command, std::vector<std::string>& arguments) {
  std::size_t at = 0;
  bool marked = false;
  for (; at < arguments.size() && !marked; ++at) {
    std::string& argument = arguments[at];
    if (argument.empty() || argument[0] != '-') break;
    marked = argument == "--";
    // Accepts --nproc_per_node too, as torchrun does.
    const auto name_end = argument.begin() + static_cast<std::ptrdiff_t>(std::min(argument.find('='), argument.size()));
    std::replace(argument.begin(), name_end, '_', '-');
    const bool value_follows = argument.find('=') == std::string::npos && (argument[1] == '-' || argument.size() == 2);
    const CLI::Option* option = marked ? nullptr : command.get_option_no_throw(argument);
    if (option && value_follows && option->get_expected_min() > 0) ++at;
  }
  at = std::min(at, arguments.size());
  std::vector<std::string> program(arguments.begin() + static_cast<std::ptrdiff_t>(at), arguments.end());
  arguments.resize(marked ? at - 1 : at);
  return program;
}

}  // namespace ddpkit::cli
