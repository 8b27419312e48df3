// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include <ddpkit/comm/process_group.h>

#include "step_plan.h"

namespace ddpkit::bench {

/// Backend of ranks without a process group: plain LibTorch.
inline constexpr const char* kAlone = "none";
/// Ranks without gradient exchange, with a shm barrier between backward and update.
inline constexpr const char* kBarrier = "barrier";

/// Runs one rank of a system of `ddpkit bench step`. Trains the plan's first model with its first bucket cap, as many
/// steps as `control` requests, and reports each step. Questions are "turn WARMUP STEPS" and "end". `backend`: kAlone,
/// kBarrier, or a backend of DistributedDataParallel. Returns the exit code.
int run_step_rank(const std::string& backend, const StepPlan& plan, const std::string& control);

/// Returns the number of elements on this rank that differ in any bit from rank 0's, or are not finite. Collective: all
/// ranks pass tensors of the same shapes.
std::uint64_t count_wrong_weights(const std::vector<at::Tensor>& weights, const ProcessGroup& group);

}  // namespace ddpkit::bench
