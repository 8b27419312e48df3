// Tier 0: c10/core headers only.
#pragma once

#include <c10/core/Device.h>

#include <ddpkit/comm/environment.h>

#include "clstm_ppo/options.h"

namespace clstm_ppo {

/// Where this rank's model goes: of the first --num-gpus GPUs of its host the one with its local rank's number; the CPU
/// where there are none or the backend is the CPU's. Throws ddpkit::train::UsageError for GPUs that are not there, and
/// for more ranks than GPUs, or fewer than --num-gpus.
c10::Device choose_device(const TrainOptions& options, const ddpkit::LaunchEnvironment& environment);
/// The same on a host that shows `there` GPUs.
c10::Device choose_device(const TrainOptions& options, const ddpkit::LaunchEnvironment& environment, int there);

/// On the CPU the process's threads; on a GPU TensorFloat-32 and cuDNN's benchmark, as the options say and the device
/// allows.
void set_up_device(const TrainOptions& options, c10::Device device);

/// Throws ddpkit::train::UsageError for options that do not fit together.
void check_options(const TrainOptions& options);

}  // namespace clstm_ppo
