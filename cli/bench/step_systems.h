// Tier 0 and CLI11.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "step_plan.h"
#include "step_row.h"

namespace ddpkit::bench {

/// The system that `--peers` is about: Python's DistributedDataParallel with the backend that it has for the device.
std::string python_ddp(const StepPlan& plan);

/// What the command measures: the plan, and with what.
struct StepOptions {
  StepPlan plan;
  std::vector<std::string> backends = {};  ///< Of DistributedDataParallel.
  bool backends_asked_for = false;         ///< By name: then one that is not here is an error.
  bool peers = false;                      ///< Python's DistributedDataParallel too.
  /// Times that every system's processes are started anew, over which the rounds are spread. Part of what a step takes
  /// stays with a process until it ends: where its memory came to lie, on which core its threads sleep.
  int starts = 1;
};

/// Starts every system's ranks for this model and lets them take turns on the cores; progress goes to stderr.
/// Nothing, after a sentence on stderr, when a backend that was asked for is not here. Throws WorkerFailed when a rank
/// ends early.
std::optional<std::vector<StepRow>> bench_step_of(const std::string& model, const StepOptions& options);

}  // namespace ddpkit::bench
