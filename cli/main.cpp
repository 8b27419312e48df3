#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <iostream>

#include <ddpkit/process_start.h>

#include "commands.h"

namespace {

/// Fails if stdout cannot be flushed: it may be a file on a full disk.
int checked_exit_code(int code) {
  if (std::cout.flush() && std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  std::cerr << "ddpkit: not all of the output could be written to stdout\n";
  return code == 0 ? 1 : code;
}

}  // namespace

int main(int argc, char** argv) {
  ddpkit::prepare_process();
  CLI::App app("ddpkit: data-parallel training on LibTorch, without Python", "ddpkit");
  app.set_version_flag("--version", "ddpkit " DDPKIT_VERSION);
  app.require_subcommand(1);
  std::function<int()> run;
  std::vector<std::string> arguments(argv + 1, argv + argc);
  std::vector<std::string> program;
  ddpkit::cli::add_run(app, program, run);
  ddpkit::cli::add_doctor(app, run);
  ddpkit::cli::add_estimate(app, run);
  ddpkit::cli::add_bench(app, run);
  try {
    const auto is_asked_for = [&](const CLI::App* command) { return command->get_name() == arguments[0]; };
    if (!arguments.empty() && !arguments[0].starts_with('-') && app.get_subcommands(is_asked_for).empty())
      throw CLI::ValidationError("there is no command \"" + arguments[0] + "\"");
    if (!arguments.empty() && arguments[0] == "run") {
      std::vector<std::string> own(arguments.begin() + 1, arguments.end());
      program = ddpkit::cli::split_program(*app.get_subcommand("run"), own);
      arguments.resize(1);
      arguments.insert(arguments.end(), own.begin(), own.end());
    }
    std::reverse(arguments.begin(), arguments.end());  // CLI11 expects reversed arguments.
    app.parse(arguments);
    return checked_exit_code(run());
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return checked_exit_code(app.exit(error));
    std::cerr << "ddpkit: " << error.what() << " (see ddpkit --help)\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "ddpkit: " << error.what() << '\n';
    return 1;
  }
}
