// Tier 0 and CLI11.
#pragma once

#include <functional>

#include "plan.h"
#include "row.h"

namespace ddpkit::bench {

/// The machine's own limit: the memory traffic that an in-place all-reduce cannot do without, and nothing else. One
/// thread a core and at most one a rank, pinned, on memory such as processes can share: each reads its slice of every
/// rank's buffer and writes the sum to all of them, without waiting for anybody. Rows of backend "limit".
void measure_limit(int ranks, const Plan& plan, const std::function<void(const Row&)>& on_row);

/// The loop: sums[i] over the buffers, written to each of them, for begin <= i < end.
void sum_into_all(float* const* buffers, int count, std::size_t begin, std::size_t end);

}  // namespace ddpkit::bench
