// Tier 0: the standard library only. CLI11 is declared, not included.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "timing.h"

namespace CLI {
class App;
}

namespace ddpkit::bench {

/// What each measuring process is to measure. The command, its ranks and the Open MPI program take the same options.
struct Plan {
  std::vector<std::string> collectives = {};
  std::vector<std::string> memory = {"symmetric", "private"};
  std::string min_bytes = "4K";
  std::string max_bytes = "96M";
  int step_factor = 4;
  TimingOptions timing = {};
  std::string device = "cpu";  ///< Or "cuda": the buffers of rank r are in the memory of GPU r.
  bool no_pin = false;         ///< Leave it to the scheduler where each rank runs.

  /// The sizes asked for. Throws InvalidArgument when they make no sense.
  std::vector<std::uint64_t> sizes() const;
};

void add_plan_options(CLI::App& command, Plan& plan);

/// The plan as arguments that add_plan_options() reads.
std::vector<std::string> to_arguments(const Plan& plan);

/// "4096", "4K", "4KiB", "96M", "1G": powers of 1024. Throws InvalidArgument.
std::uint64_t parse_bytes(std::string_view text);

/// 4096 as "4 KiB"; what is no whole number of a unit, in the unit below.
std::string format_bytes(std::uint64_t bytes);

/// min, min * factor, ..., and max even where that is no power of the factor away.
std::vector<std::uint64_t> size_steps(std::uint64_t min, std::uint64_t max, int factor);

}  // namespace ddpkit::bench
