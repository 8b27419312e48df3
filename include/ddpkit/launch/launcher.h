// Tier 0: the standard library only.
#pragma once

#include <ddpkit/launch/launch_options.h>

namespace ddpkit {

/// Starts `ranks` copies of a program on this host and waits for them. Sets the environment variables of torchrun
/// (RANK, LOCAL_RANK, GROUP_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID,
/// ..._RESTART_COUNT, ..._MAX_RESTARTS), and OMP_NUM_THREADS = cores / ranks unless it is set. If a rank fails, the
/// others are stopped. The ranks and their child processes do not outlive this process.
/// Throws InvalidArgument if the program cannot be started, or if the options for several hosts do not match.
LaunchResult launch(const LaunchOptions& options);

}  // namespace ddpkit
