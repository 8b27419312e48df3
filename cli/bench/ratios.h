// Tier 0: the standard library only.
#pragma once

#include <string>

namespace ddpkit::bench {

/// Appends "NAME<TAB>VALUE" to the file that DDPKIT_BENCH_RATIOS names, which script/bench compares with the committed
/// one; nothing without that variable. `value` is a cost as a share of another one, measured in the same run: less is
/// better. Throws Error when the file cannot be written.
void note_ratio(const std::string& name, double value);

}  // namespace ddpkit::bench
