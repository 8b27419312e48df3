#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/launch/launcher.h>
#include <ddpkit/parse_number.h>
#include <ddpkit/train/launch.h>

#include "commands.h"
#include "doctor/gpus.h"
#include "environment_number.h"

namespace ddpkit::cli {
namespace {

/// torchrun's default port, for launches on several hosts.
constexpr int kPortOfSeveralHosts = 29500;
constexpr int kMostHosts = 4096;

struct RunOptions {
  std::string ranks = {};  ///< Format of train::count_ranks().
  int node_rank = 0;
  std::string master_addr = {};
  std::optional<int> master_port = std::nullopt;  ///< 0: a free port.
  std::string rdzv_endpoint = {};
  HostOptions hosts = {};  ///< Number of hosts; the rest with `rdzv_endpoint`.
  double heartbeat_seconds = 4;
  std::string key_file = {};
  bool standalone = false;
  int max_restarts = 0;
  int min_ranks = 0;
  int max_replacements = 0;
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

/// Parses N or MIN:MAX.
train::Options::Parse node_count(RunOptions& run) {
  return [&run](const std::string& text) -> std::string {
    const std::string_view all = text;
    const auto colon = all.find(':');
    const bool is_range = colon != std::string_view::npos;
    int least = 0, most = 0;
    if (!parse_number(all.substr(0, colon), least) || !parse_number(all.substr(is_range ? colon + 1 : 0), most) ||
        least < 1 || most < least || most > kMostHosts)
      return fmt::format("a number from 1 to {}, or a range MIN:MAX", kMostHosts);
    run.hosts.min_hosts = least;
    run.hosts.max_hosts = most;
    return "";
  };
}

std::string text_of_nodes(const RunOptions& run) {
  return run.hosts.min_hosts == run.hosts.max_hosts ? std::to_string(run.hosts.max_hosts)
                                                    : fmt::format("{}:{}", run.hosts.min_hosts, run.hosts.max_hosts);
}

/// Parses HOST or HOST:PORT. An IPv6 address with a port has brackets.
train::Options::Parse endpoint(RunOptions& run) {
  return [&run](const std::string& text) -> std::string {
    const auto bracket = text.starts_with('[') ? text.find(']') : std::string::npos;
    const auto colon = text.find(':', bracket == std::string::npos ? 0 : bracket);
    const bool is_ipv6 = bracket == std::string::npos && colon != text.rfind(':');
    HostOptions hosts = run.hosts;
    if (colon != std::string::npos && !is_ipv6 &&
        (!parse_number(std::string_view(text).substr(colon + 1), hosts.port) || hosts.port < 1 || hosts.port > 65535))
      return "HOST:PORT with a port from 1 to 65535";
    hosts.address = is_ipv6 ? text : text.substr(0, colon);
    if (bracket != std::string::npos) hosts.address = text.substr(1, bracket - 1);
    if (hosts.address.empty()) return "HOST:PORT";
    run.hosts = hosts;
    run.rdzv_endpoint = text;
    return "";
  };
}

/// Parses last_call_timeout=SECONDS,join_timeout=SECONDS.
train::Options::Parse timeouts(RunOptions& run) {
  return [&run](const std::string& text) -> std::string {
    for (std::string_view rest = text; !rest.empty();) {
      const std::string_view item = rest.substr(0, rest.find(','));
      rest.remove_prefix(std::min(rest.size(), item.size() + 1));
      const std::string_view name = item.substr(0, item.find('='));
      double seconds = -1;
      if (item.size() > name.size()) parse_number(item.substr(name.size() + 1), seconds);
      const bool is_last_call = name == "last_call_timeout";
      if ((!is_last_call && name != "join_timeout") || !(seconds >= 0 && seconds <= 1e6))
        return "last_call_timeout=SECONDS, join_timeout=SECONDS or both, separated by a comma";
      (is_last_call ? run.hosts.last_call_timeout : run.hosts.join_timeout) =
          std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
    }
    return "";
  };
}

std::string text_of_timeouts(const RunOptions& run) {
  return fmt::format("last_call_timeout={:g},join_timeout={:g}",
                     static_cast<double>(run.hosts.last_call_timeout.count()) / 1000,
                     static_cast<double>(run.hosts.join_timeout.count()) / 1000);
}

LaunchOptions resolve(const RunOptions& options) {
  LaunchOptions launch{.command = options.program, .ranks = train::count_ranks(options.ranks, visible_gpus())};
  launch.node_rank = options.node_rank;
  launch.key_file = options.key_file;
  launch.max_restarts = options.max_restarts;
  launch.min_ranks = options.min_ranks;
  launch.max_replacements = options.max_replacements;
  launch.numa_binding = options.numa_binding;
  launch.signal_grace = std::chrono::milliseconds(static_cast<std::int64_t>(options.grace_seconds * 1000));
  launch.grace = std::min(launch.grace, launch.signal_grace);
  launch.log_dir = options.log_dir;
  launch.show_stdout = options.tee & 1;
  launch.show_stderr = options.tee & 2;
  launch.forward_signals = true;
  const bool one_host = options.hosts.max_hosts == 1;
  if (!options.rdzv_endpoint.empty()) {
    if (options.min_ranks > 0)
      throw InvalidArgument("--min-ranks is for one host: with --rdzv-endpoint all ranks of a host are needed");
    return launch;
  }
  if (options.hosts.min_hosts != options.hosts.max_hosts)
    throw InvalidArgument(fmt::format("--nnodes {} needs --rdzv-endpoint: without it the number of hosts is fixed",
                                      text_of_nodes(options)));
  launch.nodes = options.hosts.max_hosts;
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
        "--max-restarts with --nnodes above 1 needs --rdzv-endpoint HOST:PORT and --key-file FILE instead of "
        "--master-addr: only then all hosts restart together");
  if (options.min_ranks > 0)
    throw InvalidArgument("--min-ranks is for one host: with --nnodes above 1 all ranks are needed");
  if (options.node_rank >= options.hosts.max_hosts)
    throw InvalidArgument(
        fmt::format("--node-rank {} is not below --nnodes {}", options.node_rank, options.hosts.max_hosts));
  return launch;
}

int run_ranks(const RunOptions& options) {
  LaunchOptions launch = resolve(options);
  if (!options.rdzv_endpoint.empty()) {
    HostOptions hosts = options.hosts;
    hosts.max_restarts = options.max_restarts;
    hosts.heartbeat_timeout = std::chrono::milliseconds(static_cast<std::int64_t>(options.heartbeat_seconds * 1000));
    hosts.on_report = [](const std::string& text) { std::cerr << "ddpkit run: " + text; };
    std::signal(SIGUSR1, SIG_IGN);  // Between rounds, no rank has a state to print.
    return launch_on_hosts(launch, hosts);
  }
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
  command.add(
      "nnodes", node_count(run), [&run] { return text_of_nodes(run); },
      "Number of hosts; each runs one launcher. With --rdzv-endpoint also MIN:MAX");
  command
      .add(
          "rdzv_endpoint", endpoint(run), [&run] { return run.rdzv_endpoint; },
          "Several hosts: HOST:PORT of the launchers' rendezvous (default port: 29400). The launcher on HOST serves it "
          "and is host 0; the others are numbered in the order of their arrival")
      .excludes("node_rank")
      .excludes("master_addr")
      .excludes("master_port");
  command.add("rdzv_id", &run.hosts.run_id, "Name of the run; only launchers with this name and the key can join")
      .needs("rdzv_endpoint");
  command
      .add(
          "rdzv_conf", timeouts(run), [&run] { return text_of_timeouts(run); },
          "join_timeout=SECONDS: wait for MIN hosts; last_call_timeout=SECONDS: then for MAX hosts")
      .needs("rdzv_endpoint");
  command
      .add("heartbeat_timeout", &run.heartbeat_seconds,
           "Seconds without a heartbeat of a host's launcher until the host is lost")
      .between(0.5, 3600)
      .needs("rdzv_endpoint");
  command.add("node_rank", &run.node_rank, "Index of this host").between(0, kMostHosts - 1);
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
      .excludes("nnodes")
      .excludes("rdzv_endpoint");
  command
      .add("max_restarts", &run.max_restarts,
           "Maximum number of restarts of all ranks after a failure. Several hosts: needs --rdzv-endpoint")
      .between(0, 1e6);
  command
      .add("min_ranks", &run.min_ranks,
           "After a failure, do not end the others while at least this many run: for programs that continue without a "
           "lost rank; 0: all ranks")
      .between(0, 1e6);
  command
      .add("max_replacements", &run.max_replacements,
           "Start a new process for a lost rank, at most this often; it joins the others between two steps")
      .between(0, 1e6)
      .needs("min_ranks");
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
