// Tier 0: the standard library only.
#pragma once

#include <functional>

#include "plan.h"
#include "row.h"

namespace ddpkit::bench {

/// Measures the limit of the machine: only the memory traffic that an in-place all-reduce needs. Starts one pinned
/// thread per core, at most one per rank, on memory that processes can share. Each thread reads its slice of the
/// buffers of all ranks and writes the sum to all buffers, without synchronization. Rows have backend "limit".
void measure_limit(int ranks, const Plan& plan, const std::function<void(const Row&)>& on_row);

/// Computes the sum over all buffers for begin <= i < end and writes it to each buffer.
void sum_into_all(float* const* buffers, int count, std::size_t begin, std::size_t end);

}  // namespace ddpkit::bench
