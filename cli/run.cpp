#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/launch/launcher.h>
#include <ddpkit/train/launch.h>

#include "commands.h"
#include "doctor/gpus.h"
#include "environment_number.h"

namespace ddpkit::cli {
namespace {

/// torchrun's default port, for launches on several hosts.
constexpr int kPortOfSeveralHosts = 29500;

struct RunOptions {
  std::string ranks = {};  ///< Format of train::count_ranks().
  int nodes = 1;
  int node_rank = 0;
  std::string master_addr = {};
  std::optional<int> master_port = std::nullopt;  ///< 0: a free port.
  std::string key_file = {};
  bool standalone = false;
  int max_restarts = 0;
  int min_ranks = 0;
  std::string log_dir = {};
  int tee = 3;
  double grace_seconds = 30;
  NumaBinding numa_binding = NumaBinding::kNode;
  std::vector<std::string> program = {};  ///< With its arguments.
};

/// Returns the number of GPUs that the ranks will see.
int visible_gpus() {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  const auto all = static_cast<int>(read_gpus().gpus.size());
  if (!visible) return all;
  const std::string list = visible;
  return list.empty() ? 0 : std::min<int>(all, static_cast<int>(std::count(list.begin(), list.end(), ',')) + 1);
}

LaunchOptions resolve(const RunOptions& options) {
  LaunchOptions launch{
      .command = options.program, .ranks = train::count_ranks(options.ranks, visible_gpus()), .nodes = options.nodes};
  launch.node_rank = options.node_rank;
  launch.key_file = options.key_file;
  launch.max_restarts = options.max_restarts;
  launch.min_ranks = options.min_ranks;
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
    if (!options.key_file.empty())
      throw InvalidArgument("--key-file is for several hosts: one host makes a random key for each launch");
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
  if (options.min_ranks > 0)
    throw InvalidArgument("--min-ranks is for one host: with --nnodes above 1 all ranks are needed");
  if (options.node_rank >= options.nodes)
    throw InvalidArgument(fmt::format("--node-rank {} is not below --nnodes {}", options.node_rank, options.nodes));
  return launch;
}

int run_ranks(const RunOptions& options) {
  LaunchOptions launch = resolve(options);
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

void add_run(train::Options& app, Commands& commands) {
  train::Options& command = app.command("run", "Start a program on several ranks of this host");
  command.epilog(
      "Example: ddpkit run -n 2 -- PROGRAM ARGUMENTS\n\n"
      "Options are torchrun's, with dashes or underscores. Sets RANK, LOCAL_RANK, GROUP_RANK, WORLD_SIZE,\n"
      "LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT,\n"
      "TORCHELASTIC_MAX_RESTARTS, and OMP_NUM_THREADS (cores / N) if it is not set.\n\n"
      "Rank 0's output is unchanged. The lines of the other ranks go to stderr, prefixed with \"[rank N] \".\n"
      "If a rank fails, the launcher ends the other ranks and exits with the rank's exit code, or 128 + signal\n"
      "(but see --min-ranks).\n"
      "Forwards SIGINT and SIGTERM, and SIGHUP as SIGTERM. A second signal kills the ranks.\n"
      "SIGUSR1 prints what each rank is doing.");
  auto shared = std::make_shared<RunOptions>();
  RunOptions& run = *shared;
  command
      .add(
          "nproc_per_node", train::rank_count(run.ranks), [&run] { return run.ranks; },
          "Ranks to start: a number, gpu, cpu (cores), or auto")
      .also("n")
      .required();
  command.add("nnodes", &run.nodes, "Number of hosts; each runs one launcher").between(1, 4096);
  command.add("node_rank", &run.node_rank, "Index of this host").between(0, 4095);
  command.add("master_addr", &run.master_addr, "Host of rank 0");
  command
      .add("master_port", &run.master_port,
           "Rendezvous port, 0: a free port (default: MASTER_PORT, or a free port; 29500 for several hosts)")
      .between(0, 65535);
  command.add("key_file", &run.key_file,
              "Several hosts: file with the same 32 to 4096 random bytes on all hosts, mode 0600; only ranks with this "
              "key can join (default: DDPKIT_KEY_FILE)");
  command.add("standalone", &run.standalone, "One host and a free port; ignores the environment")
      .excludes("master_addr")
      .excludes("master_port")
      .excludes("nnodes");
  command.add("max_restarts", &run.max_restarts, "Maximum number of restarts of all ranks after a failure")
      .between(0, 1e6);
  command
      .add("min_ranks", &run.min_ranks,
           "After a failure, do not end the others while at least this many run: for programs that continue without a "
           "lost rank; 0: all ranks")
      .between(0, 1e6);
  command.add("log_dir", &run.log_dir,
              "Folder for each rank's output: attempt_A/RANK/{stdout,stderr}.log, and collectives.txt, its last 1,024 "
              "collectives and timeline events; A increases with each start");
  command.add("tee", &run.tee, "With --log-dir, also print: 0 nothing, 1 stdout, 2 stderr, 3 both")
      .between(0, 3)
      .needs("log_dir");
  command
      .add("grace_seconds", &run.grace_seconds,
           "Time for the ranks to end after SIGINT or SIGTERM before they are killed")
      .between(0, 86400);
  command.add("numa_binding", &run.numa_binding,
              {{"none", NumaBinding::kNone}, {"node", NumaBinding::kNode}, {"exclusive", NumaBinding::kExclusive}},
              "Cores of a rank: those of one NUMA node (node), a separate part of a node (exclusive), all (none)");
  command.add("program", &run.program, "The program and its arguments").rest().required();
  commands.emplace_back(&command, [shared] { return run_ranks(*shared); });
}

}  // namespace ddpkit::cli
