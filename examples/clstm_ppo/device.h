// Tier 0: c10/core headers only.
#pragma once

#include <c10/core/Device.h>

#include <ddpkit/comm/environment.h>

#include "clstm_ppo/options.h"

namespace clstm_ppo {

/// Returns the device of this rank's model: the GPU with the number of the local rank, among the first --num-gpus GPUs
/// of the host. Returns the CPU if there are no GPUs or the backend is for the CPU. Throws ddpkit::train::UsageError
/// for missing GPUs, for more ranks than GPUs, and for fewer ranks than --num-gpus.
c10::Device choose_device(const TrainOptions& options, const ddpkit::LaunchEnvironment& environment);
/// Returns the same for a host with `there` GPUs.
c10::Device choose_device(const TrainOptions& options, const ddpkit::LaunchEnvironment& environment, int there);

/// Applies the options that the device supports: on the CPU the number of threads; on a GPU TensorFloat-32 and the
/// cuDNN benchmark.
void set_up_device(const TrainOptions& options, c10::Device device);

/// Throws ddpkit::train::UsageError for options that exclude each other.
void check_options(const TrainOptions& options);

}  // namespace clstm_ppo
