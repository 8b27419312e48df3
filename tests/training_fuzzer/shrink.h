// Shrinks a failing case as long as it fails in the same way.
#pragma once

#include <functional>
#include <vector>

#include "case.h"

namespace ddpkit::fuzz {

/// Returns cases with one part less: an event, a node, or a key that is not its default.
std::vector<Case> smaller(const Case& drawn);

/// `fails(smaller case)` runs a case and returns true if the verdict is the same. Makes at most `tries` runs.
Case shrink(Case drawn, const std::function<bool(const Case&)>& fails, int tries = 250);

}  // namespace ddpkit::fuzz
