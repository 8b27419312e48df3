#include <algorithm>
#include <iostream>
#include <memory>

#include <fmt/format.h>

#include <ddpkit/comm/environment.h>
#include <ddpkit/error.h>

#include "bench/device.h"
#include "bench/python.h"
#include "bench/step_rank.h"
#include "bench/step_systems.h"
#include "bench/workers.h"
#include "commands.h"
#include "output_file.h"

namespace ddpkit::cli {
namespace {

using namespace bench;

struct StepCommandOptions {
  StepOptions step;
  std::int64_t hidden = 128;  ///< For a custom MLP.
  int layers = 3;
  std::string csv;
  std::string as_rank;  ///< Hidden option: this process is one of the ranks, with this backend.
  std::string control;  ///< Hidden option: the pipes for questions.
};

/// Derives defaults from the other options.
void complete(StepOptions& step) {
  const bool on_cpu = step.plan.device == "cpu";
  step.plan.ranks = ranks_on(step.plan.device, step.plan.ranks);
  if (step.backends.empty())
    step.backends = on_cpu ? std::vector<std::string>{"shm", "gloo"} : std::vector<std::string>{"nccl"};
  for (const std::string& backend : step.backends) {
    if (on_cpu ? backend == "nccl" : backend == "gloo")
      throw InvalidArgument(fmt::format("--backend {} has no use for --device {}", backend, step.plan.device));
  }
  const std::vector<std::string> updates = updates_of(step.plan);
  if (on_cpu && std::find(updates.begin(), updates.end(), kGraphedUpdate) != updates.end())
    throw InvalidArgument("--update graphed needs --device cuda: a CPU has no graphs");
}

void check(const StepCommandOptions& options) {
  for (const std::string& model : options.step.plan.models) mlp_shape(model);
  for (const std::string& cap : options.step.plan.bucket_caps_mb) bucket_caps(cap);
  if (options.step.peers) {
    if (const std::string reason = why_no_python(); !reason.empty()) throw InvalidArgument(reason);
  }
  if (!options.csv.empty()) check_output(options.csv);
}

/// Prints the speed-up of each ddpkit system over Python, each with its best bucket cap.
void compare_with_python(const std::vector<StepRow>& rows, const std::string& python_system) {
  const auto python =
      std::find_if(rows.begin(), rows.end(), [&](const StepRow& r) { return r.system == python_system; });
  if (python == rows.end()) return;
  for (const StepRow& row : rows) {
    if (row.system.starts_with("ddpkit-"))
      std::cerr << fmt::format("{}: {} ({}) takes {:.3f} ms a step, Python {:.3f} ms: {:.1f} times as fast\n",
                               row.model, row.system, row.bucket_cap_mb, row.us / 1e3, python->us / 1e3,
                               python->us / row.us);
  }
}

int run_bench(const StepCommandOptions& options) {
  std::string csv = std::string(kStepCsvHeader) + "\n";
  if (options.step.plan.device == "cpu" && options.step.plan.ranks > available_cores())
    std::cerr << fmt::format("{} ranks on {} cores: ranks share cores\n", options.step.plan.ranks, available_cores());
  std::cout << step_table_header() << std::endl;
  std::uint64_t wrong = 0;
  for (const std::string& model : options.step.plan.models) {
    const auto rows = bench_step_of(model, options.step);
    if (!rows) return 2;
    for (const StepRow& row : *rows) {
      std::cout << table_row(row) << std::endl;
      csv += to_csv(row) + "\n";
      wrong += row.end.wrong;
    }
    compare_with_python(*rows, python_ddp(options.step.plan));
  }
  if (!options.csv.empty()) write_output(options.csv, csv);
  if (wrong > 0) std::cerr << "ddpkit bench: " << wrong << " weights are wrong: see the column #wrong\n";
  return wrong > 0 ? 1 : 0;
}

}  // namespace

void add_bench_step(train::Options& bench, Commands& commands) {
  train::Options& command = bench.command("step", "Time of a training step: alone, and on several ranks");
  command.epilog(
      "A step is zero_grad, forward, backward with the gradient exchange, and the optimizer's update.\n"
      "Starts one process with one thread per rank and pins each rank to one core if there are enough cores.\n"
      "All systems take turns in one run. Finally compares the weights of the ranks bit for bit. #wrong counts wrong\n"
      "weights; if there are any, the exit code is 1. docs/benchmarks.md explains the columns.");
  auto shared = std::make_shared<StepCommandOptions>();
  StepCommandOptions& options = *shared;
  StepPlan& plan = options.step.plan;
  declare(command, plan);
  command.add("hidden", &options.hidden, "Width of a custom MLP").between(1, 65536);
  command.add("layers", &options.layers, "Hidden layers of the custom MLP").between(1, 1024);
  command.add("nproc_per_node", &plan.ranks, "Number of ranks (default: 2; with --device cuda, one on each GPU)")
      .between(1, 4096)
      .also("n")
      .also("ranks");
  command.add("backend", &options.step.backends, "shm, gloo, nccl (default: shm and gloo; on GPUs nccl)")
      .one_of({"shm", "gloo", "nccl"});
  command.add("steps", &plan.steps, "Timed steps per system (default: as many as fit into 1.5 s)").between(1, 1e8);
  command
      .add("starts", &options.step.starts,
           "Number of starts of all processes; the rounds are distributed over the starts")
      .between(1, 100);
  command.add("peers", &options.step.peers,
              "Also measure PyTorch's DistributedDataParallel, with Gloo or NCCL, with the Python in "
              "DDPKIT_PEER_PYTHON");
  command.add("csv", &options.csv, "Also write the rows to this file");
  command.add("as_rank", &options.as_rank, "").hidden();
  command.add("control", &options.control, "").hidden();
  commands.emplace_back(&command, [shared, &command] {
    StepCommandOptions& options = *shared;
    StepPlan& plan = options.step.plan;
    options.step.backends_asked_for = command.is_given("backend");
    if (command.is_given("hidden") || command.is_given("layers")) {
      if (!command.is_given("model")) plan.models.clear();
      plan.models.push_back(fmt::format("mlp-{}x{}", options.hidden, options.layers));
    }
    try {
      if (options.as_rank.empty()) complete(options.step);
      check(options);
    } catch (const InvalidArgument& error) {
      throw train::UsageError(error.what());
    }
    if (!options.as_rank.empty()) return run_step_rank(options.as_rank, plan, options.control);
    return run_with_workers([&] { return run_bench(options); });
  });
}

}  // namespace ddpkit::cli
