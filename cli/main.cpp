#include <exception>
#include <iostream>

#include "commands.h"

int main(int argc, char** argv) {
  CLI::App app("ddpkit: data-parallel training on LibTorch, without Python", "ddpkit");
  app.set_version_flag("--version", "ddpkit " DDPKIT_VERSION);
  app.require_subcommand(1);
  std::function<int()> run;
  ddpkit::cli::add_run(app, run);
  try {
    app.parse(argc, argv);
    return run();
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    std::cerr << "ddpkit: " << error.what() << " (see ddpkit --help)\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "ddpkit: " << error.what() << '\n';
    return 1;
  }
}
