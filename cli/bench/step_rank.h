// Tier 1: ATen/core/Tensor.h, and CLI11.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include <ddpkit/comm/process_group.h>

#include "step_plan.h"

namespace ddpkit::bench {

/// The backend of ranks that are no group: plain LibTorch.
inline constexpr const char* kAlone = "none";
/// Alone but for a barrier of shm between backward and update.
inline constexpr const char* kBarrier = "barrier";

/// What one rank of a system of `ddpkit bench step` does: trains the plan's first model, with its first bucket cap, as
/// many steps as it is asked for through `control`, and reports each. Questions are "turn WARMUP STEPS" and "end".
/// `backend`: kAlone, kBarrier, or that of a DistributedDataParallel. Returns the exit code.
int run_step_rank(const std::string& backend, const StepPlan& plan, const std::string& control);

/// Elements that differ in any bit from rank 0's, or are not finite. Collective: all ranks pass tensors of the same
/// shapes; counts this rank's.
std::uint64_t count_wrong_weights(const std::vector<at::Tensor>& weights, const ProcessGroup& group);

}  // namespace ddpkit::bench
