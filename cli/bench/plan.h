// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <ddpkit/train/options.h>

#include "timing.h"

namespace ddpkit::bench {

/// The measurements of each process. The command, its ranks and the programs of other libraries have the same options.
struct Plan {
  std::vector<std::string> collectives = {};
  std::vector<std::string> memory = {"symmetric", "private"};
  std::string min_bytes = "4K";
  std::string max_bytes = "96M";
  int step_factor = 4;
  TimingOptions timing = {};
  std::string device = "cpu";  ///< Or "cuda": the buffers of rank r are on GPU r.
  bool no_pin = false;         ///< Do not pin ranks to cores.

  /// Returns the sizes to measure. Throws InvalidArgument for invalid options.
  std::vector<std::uint64_t> sizes() const;
};

/// Declares the options of the plan.
void declare(train::Options& options, Plan& plan);

/// Returns the plan as arguments for declare().
std::vector<std::string> to_arguments(const Plan& plan);

/// Parses "4096", "4K", "4KiB", "96M", "1G": powers of 1024. Throws InvalidArgument.
std::uint64_t parse_bytes(std::string_view text);

/// Formats 4096 as "4 KiB". Uses the largest unit that gives an integer.
std::string format_bytes(std::uint64_t bytes);

/// Returns min, min * factor, min * factor^2, ..., and max as the last element.
std::vector<std::uint64_t> size_steps(std::uint64_t min, std::uint64_t max, int factor);

}  // namespace ddpkit::bench
