#pragma once

#include <torch/cuda.h>

#include <chrono>

#include "support/catch.h"
#include "support/children.h"

/// Whether a GPU is available. A child process finds out: CUDA does not survive a fork, and on_ranks forks.
inline bool has_gpu() {
  const auto look = [](int) { return torch::cuda::is_available() ? 0 : 1; };
  return ddpkit::testing::run_children(1, look, {.time_limit = std::chrono::seconds(100)}).ends[0].ok();
}

/// Ends the test as skipped where there is no GPU, saying which of the two reasons it is.
#define NEEDS_GPU()                                                                                         \
  do {                                                                                                      \
    if (!has_gpu())                                                                                         \
      DDPKIT_SKIP(torch::hasCUDA() ? "no GPU on this host" : "this build has no CUDA, or the host no GPU"); \
  } while (false)
