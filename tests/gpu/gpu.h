#pragma once

#include <sys/wait.h>
#include <torch/cuda.h>

#include <chrono>
#include <cstdlib>
#include <cstring>

#include "support/catch.h"
#include "support/children.h"

/// Returns the number of GPUs. A child process counts them: CUDA does not survive a fork, and on_ranks forks.
inline int gpu_count() {
  const auto count = [](int) { return static_cast<int>(torch::cuda::device_count()); };
  const int status = ddpkit::testing::run_children(1, count, {.time_limit = std::chrono::seconds(100)}).ends[0].status;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

/// Ends the test as skipped if there are fewer GPUs, and prints the reason.
#define NEEDS_GPUS(needed)                                                                                  \
  do {                                                                                                      \
    const int available = gpu_count();                                                                      \
    if (available == 0)                                                                                     \
      DDPKIT_SKIP(torch::hasCUDA() ? "no GPU on this host" : "this build has no CUDA, or the host no GPU"); \
    if (available < (needed)) DDPKIT_SKIP("fewer GPUs on this host than the test needs: " #needed);         \
  } while (false)

#define NEEDS_GPU() NEEDS_GPUS(1)

inline bool has_virtual_gpus() {
  const char* preloaded = std::getenv("LD_PRELOAD");
  return preloaded && std::strstr(preloaded, "libcudart.so.13");
}

/// Ends the test as skipped on real GPUs, which cannot inject faults.
#define NEEDS_VIRTUAL_GPUS()                                    \
  do {                                                          \
    if (!has_virtual_gpus()) DDPKIT_SKIP("needs virtual GPUs"); \
  } while (false)
