#include "commands.h"

namespace ddpkit::cli {

void add_bench(train::Options& app, Commands& commands) {
  train::Options& bench = app.command("bench", "Measure what ddpkit does on this machine");
  bench.remove({"config"});
  add_bench_collectives(bench, commands);
  add_bench_step(bench, commands);
  add_bench_recovery(bench, commands);
  commands.emplace_back(
      &bench, []() -> int { throw train::UsageError("which benchmark? there are: collectives, step, recovery"); });
}

}  // namespace ddpkit::cli
