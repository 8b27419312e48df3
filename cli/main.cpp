#include <cstdio>
#include <exception>
#include <iostream>

#include <ddpkit/process_start.h>
#include <ddpkit/train/options.h>

#include "commands.h"

namespace {

/// Fails if stdout cannot be flushed: it may be a file on a full disk.
int checked_exit_code(int code) {
  if (std::cout.flush() && std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  std::cerr << "ddpkit: not all of the output could be written to stdout\n";
  return code == 0 ? 1 : code;
}

int run(int argc, char** argv) {
  ddpkit::train::Options app("ddpkit", "Data-parallel training on LibTorch, without Python");
  app.remove({"config"});
  bool wants_version = false;
  app.add("version", &wants_version, "Print the version");
  ddpkit::cli::Commands commands;
  ddpkit::cli::add_run(app, commands);
  ddpkit::cli::add_doctor(app, commands);
  ddpkit::cli::add_estimate(app, commands);
  ddpkit::cli::add_bench(app, commands);
  std::string text = app.parse(argc, argv);
  if (wants_version) text = "ddpkit " DDPKIT_VERSION "\n";
  std::cout << text;
  if (!text.empty()) return 0;
  for (const auto& [command, body] : commands) {
    if (command->is_chosen()) return body();
  }
  throw ddpkit::train::UsageError("a command is missing: run, doctor, estimate or bench");
}

}  // namespace

int main(int argc, char** argv) try {
  ddpkit::prepare_process();
  return checked_exit_code(run(argc, argv));
} catch (const ddpkit::train::UsageError& error) {
  std::cerr << "ddpkit: " << error.what() << " (see ddpkit --help)\n";
  return 2;
} catch (const std::exception& error) {
  std::cerr << "ddpkit: " << error.what() << '\n';
  return 1;
}
