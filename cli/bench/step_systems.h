// Tier 0: the standard library only.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "step_plan.h"
#include "step_row.h"

namespace ddpkit::bench {

/// Returns the name of the system for `--peers`: PyTorch's DistributedDataParallel with its backend for the device.
std::string python_ddp(const StepPlan& plan);

/// The plan and the systems to measure.
struct StepOptions {
  StepPlan plan;
  std::vector<std::string> backends = {};  ///< Backends of DistributedDataParallel.
  bool backends_asked_for = false;         ///< The backends were requested by name: a missing backend is an error.
  bool peers = false;                      ///< Also measure PyTorch's DistributedDataParallel.
  /// Number of restarts of all processes. The rounds are distributed over the restarts. The step time depends in part
  /// on the process: on its memory addresses and on the cores of its threads.
  int starts = 1;
};

/// Starts the ranks of all systems for this model and runs them in turns on the cores. Prints progress to stderr. If a
/// requested backend is not available, prints one sentence to stderr and returns nothing. Throws WorkerFailed if a rank
/// ends early.
std::optional<std::vector<StepRow>> bench_step_of(const std::string& model, const StepOptions& options);

}  // namespace ddpkit::bench
