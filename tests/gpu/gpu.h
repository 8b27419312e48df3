#pragma once

#include <torch/cuda.h>

#include "support/catch.h"

/// Ends the test as skipped where there is no GPU, saying which of the two reasons it is.
#define NEEDS_GPU()                                                                                         \
  do {                                                                                                      \
    if (!torch::cuda::is_available())                                                                       \
      DDPKIT_SKIP(torch::hasCUDA() ? "no GPU on this host" : "this build has no CUDA, or the host no GPU"); \
  } while (false)
