// Tier 0: the standard library only.
#pragma once

#include <string>

namespace ddpkit::bench {

/// Appends "NAME<TAB>VALUE" to the file in DDPKIT_BENCH_RATIOS. Does nothing if the variable is not set. script/bench
/// compares the file with the committed one. `value`: a cost relative to another cost of the same run; less is better.
/// Throws Error if the file cannot be written.
void note_ratio(const std::string& name, double value);

}  // namespace ddpkit::bench
