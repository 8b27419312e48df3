#include <iostream>
#include <memory>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "bench/python.h"
#include "bench/recovery_rank.h"
#include "bench/recovery_systems.h"
#include "bench/step_plan.h"
#include "bench/workers.h"
#include "commands.h"
#include "output_file.h"

namespace ddpkit::cli {
namespace {

using namespace bench;

struct RecoveryCommandOptions {
  RecoveryOptions recovery;
  std::string csv;
  RecoveryRankOptions rank;  ///< Of the hidden options: this process is one of the ranks.
};

int run_bench(const RecoveryCommandOptions& options) {
  std::string csv = std::string(kRecoveryCsvHeader) + "\n";
  std::cout << recovery_table_header() << std::endl;
  for (const std::int64_t resident_mib : options.recovery.resident_mib) {
    for (const std::string& system : recovery_systems(options.recovery)) {
      const RecoveryRow row = bench_recovery_of(system, resident_mib, options.recovery);
      std::cout << table_row(row) << std::endl;
      csv += to_csv(row) + "\n";
    }
  }
  if (!options.csv.empty()) write_output(options.csv, csv);
  return 0;
}

}  // namespace

void add_bench_recovery(train::Options& bench, Commands& commands) {
  train::Options& command = bench.command("recovery", "Time from the kill of a rank to the next step");
  command.epilog(
      "Trains an MLP, kills one rank with SIGKILL at a random moment of a step, and waits for the next step of all "
      "other\n"
      "ranks (ddpkit-restart: of all ranks). Each round starts new processes; the figures are medians over the "
      "rounds.\n"
      "docs/benchmarks.md explains the columns.");
  auto shared = std::make_shared<RecoveryCommandOptions>();
  RecoveryCommandOptions& options = *shared;
  command.add("nproc_per_node", &options.recovery.ranks, "Number of ranks").between(2, 1024).also("n").also("ranks");
  command.add("rounds", &options.recovery.rounds, "Kills per system").between(1, 1000);
  command.add("model", &options.recovery.model, "An MLP of ddpkit bench step");
  command.add("optimizer", &options.recovery.optimizer, "sgd or adamw, whose state a new rank needs too")
      .one_of({"sgd", "adamw"});
  command
      .add("resident_mib", &options.recovery.resident_mib, "Additional memory of each rank; several values: more rows")
      .between(0, 1 << 20);
  command.add("seed", &options.recovery.seed, "Of the ranks and the moments");
  command.add("peers", &options.recovery.peers, "Also measure torchft, with the Python in DDPKIT_PEER_TORCHFT");
  command.add("csv", &options.csv, "Also write the rows to this file");
  command.add("as_rank", &options.rank.system, "").hidden();
  command.add("checkpoint", &options.rank.checkpoint, "").hidden();
  commands.emplace_back(&command, [shared] {
    RecoveryCommandOptions& options = *shared;
    if (!options.rank.system.empty()) {
      options.rank.model = model_argument(options.recovery.model);
      options.rank.optimizer = options.recovery.optimizer;
      options.rank.resident_mib = options.recovery.resident_mib.front();
      return run_recovery_rank(options.rank);
    }
    try {
      if (!mlp_shape(options.recovery.model))
        throw InvalidArgument(fmt::format("bench recovery trains only MLPs, not {}", options.recovery.model));
      if (options.recovery.peers) {
        if (const std::string reason = why_no_torchft(); !reason.empty()) throw InvalidArgument(reason);
      }
      if (!options.csv.empty()) check_output(options.csv);
    } catch (const InvalidArgument& error) {
      throw train::UsageError(error.what());
    }
    return run_with_workers([&] { return run_bench(options); });
  });
}

}  // namespace ddpkit::cli
