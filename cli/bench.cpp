#include <CLI/CLI.hpp>

#include "commands.h"

namespace ddpkit::cli {

void add_bench(CLI::App& app, std::function<int()>& run) {
  CLI::App* command = app.add_subcommand("bench", "Measure what ddpkit does on this machine");
  add_bench_collectives(*command, run);
  add_bench_step(*command, run);
  command->allow_extras();
  command->callback([command] {
    const std::string there_are = "; there are: collectives, step";
    if (const auto unknown = command->remaining(); !unknown.empty())
      throw CLI::ValidationError("there is no benchmark \"" + unknown[0] + "\"" + there_are);
    if (command->get_subcommands().empty()) throw CLI::ValidationError("which benchmark?" + there_are.substr(1));
  });
}

}  // namespace ddpkit::cli
