#include <algorithm>
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

void add_run(CLI::App& app, const std::vector<std::string>& program, std::function<int()>& run) {
  auto options = std::make_shared<LocalLaunchOptions>();
  CLI::App* command = app.add_subcommand("run", "Start a program on several ranks of this host");
  command->footer(
      "Usage: ddpkit run -n N [OPTIONS] [--] PROGRAM [ARGS...]\n\n"
      "Sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and OMP_NUM_THREADS (cores / N)\n"
      "where it is not set. Rank 0's output is left as it is; the lines of the others go to stderr behind \"[rank N] "
      "\".\n"
      "When a rank fails the others are ended, and the exit code is its own (128 + signal when it was killed).");
  command->add_option("-n,--nproc-per-node", options->ranks, "Ranks to start")
      ->required()
      ->check(CLI::Range(1, 4096))
      ->type_name("N");
  command
      ->add_option("--master-port", options->master_port,
                   "Port at which the ranks meet (default: MASTER_PORT, or a free one)")
      ->check(CLI::Range(1, 65535))
      ->type_name("PORT");
  command->callback([options, &program, &run] {
    if (program.empty()) throw CLI::ValidationError("run", "there is no program to start");
    options->command = program;
    run = [options] { return run_ranks(*options); };
  });
}

std::vector<std::string> split_program(const CLI::App& command, std::vector<std::string>& arguments) {
  std::size_t at = 0;
  bool marked = false;
  for (; at < arguments.size() && !marked; ++at) {
    const std::string& argument = arguments[at];
    if (argument.empty() || argument[0] != '-') break;
    marked = argument == "--";
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
