#include <charconv>
#include <cstdlib>
#include <iostream>
#include <memory>

#include <fmt/format.h>

#include <ddpkit/comm/error.h>
#include <ddpkit/comm/local_launch.h>

#include "commands.h"

namespace ddpkit::cli {
namespace {

/// MASTER_PORT when the user has set it, 0 (a free one) when not.
int port_from_environment() {
  const char* text = std::getenv("MASTER_PORT");
  if (!text || !*text) return 0;
  int port = 0;
  const char* end = text + std::char_traits<char>::length(text);
  const auto [stop, status] = std::from_chars(text, end, port);
  if (status != std::errc{} || stop != end || port < 1 || port > 65535)
    throw InvalidArgument(fmt::format("MASTER_PORT is \"{}\", which is no port between 1 and 65535", text));
  return port;
}

int run_ranks(LocalLaunchOptions options) {
  options.forward_signals = true;
  if (options.master_port == 0) options.master_port = port_from_environment();
  const LocalLaunchResult result = local_launch(options);
  if (result.first_failure) {
    const RankExit& end = *result.first_failure;
    std::cerr << fmt::format("ddpkit run: rank {} (pid {}) {}", end.rank, end.pid, end.describe());
    if (options.ranks > 1) std::cerr << "; the other ranks were ended";
    std::cerr << '\n';
  }
  return result.exit_code();
}

}  // namespace

void add_run(CLI::App& app, std::function<int()>& run) {
  auto options = std::make_shared<LocalLaunchOptions>();
  CLI::App* command = app.add_subcommand("run", "Start a program on several ranks of this host");
  command->usage("Usage: ddpkit run -n N [OPTIONS] [--] PROGRAM [ARGS...]");
  command->footer(
      "Sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and OMP_NUM_THREADS (cores / N)\n"
      "where it is not set. Rank 0's output is left as it is; the lines of the others go to stderr behind \"[rank N] \".\n"
      "When a rank fails the others are ended, and the exit code is its own (128 + signal when it was killed).");
  command->add_option("-n,--nproc-per-node", options->ranks, "Ranks to start")
      ->required()
      ->check(CLI::Range(1, 4096))
      ->type_name("N");
  command->add_option("--master-port", options->master_port, "Port at which the ranks meet (default: MASTER_PORT, or a free one)")
      ->check(CLI::Range(1, 65535))
      ->type_name("PORT");
  command->add_option("PROGRAM", options->command, "Program, and its arguments")->required();
  // Everything from the program's name on is the program's own.
  command->positionals_at_end(false);
  command->prefix_command(false);
  command->callback([options, &run] { run = [options] { return run_ranks(*options); }; });
}

}  // namespace ddpkit::cli
