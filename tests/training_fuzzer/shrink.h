// Makes a failing case small while it goes on failing in the same way.
#pragma once

#include <functional>
#include <vector>

#include "case.h"

namespace ddpkit::fuzz {

/// Cases with one thing less: an event, a node, a key that is not its default.
std::vector<Case> smaller(const Case& drawn);

/// `fails(smaller case)` runs it: true when the verdict is the same. At most `tries` runs.
Case shrink(Case drawn, const std::function<bool(const Case&)>& fails, int tries = 250);

}  // namespace ddpkit::fuzz
