// Training runs of har under `ddpkit run`, for faults that affect checkpoints.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "examples/har_program.h"
#include "faults/fault_run.h"

namespace ddpkit::testing {

/// Returns `ddpkit run -n RANKS LAUNCHER... -- har --save-dir FOLDER OPTIONS...` for the generated data set.
inline std::vector<std::string> training(const std::filesystem::path& folder, const std::vector<std::string>& options,
                                         const std::vector<std::string>& launcher = {}, int ranks = 2) {
  std::vector<std::string> arguments = {"run", "-n", std::to_string(ranks)};
  arguments.insert(arguments.end(), launcher.begin(), launcher.end());
  for (const std::string& argument : {std::string("--"), std::string(DDPKIT_TEST_HAR), std::string("--data"),
                                      har::testing::generated(), std::string("--save-dir"), folder.string()})
    arguments.push_back(argument);
  // With har's 32, an epoch has too few updates.
  if (std::ranges::find(options, "--batch-size") == options.end())
    arguments.insert(arguments.end(), {"--batch-size", "16"});
  arguments.insert(arguments.end(), options.begin(), options.end());
  return arguments;
}

/// Returns the processes of har that a launcher is running.
std::vector<int> ranks_of(int launcher);

/// Kills ranks of a training run with restarts at `kills` random moments. Compares its weights with those of an
/// undisturbed run.
void kill_and_compare(int kills, unsigned seed);

/// Truncates a run's checkpoint at `truncations` points, and separately flips `flips` bits. The same command must
/// reject each damaged checkpoint without changing it.
void damage_checkpoints(int truncations, int flips);

}  // namespace ddpkit::testing
