// Tier 0: the standard library only.
#pragma once

#include <ddpkit/launch/host_options.h>
#include <ddpkit/launch/launch_options.h>

namespace ddpkit {

/// Starts `ranks` copies of a program on this host and waits for them. Sets the environment variables of torchrun
/// (RANK, LOCAL_RANK, GROUP_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID,
/// ..._RESTART_COUNT, ..._MAX_RESTARTS), and OMP_NUM_THREADS = cores / ranks unless it is set. If a rank fails, the
/// others are stopped. The ranks and their child processes do not outlive this process.
/// Throws InvalidArgument if the program cannot be started, or if the options for several hosts do not match.
LaunchResult launch(const LaunchOptions& options);

/// Exit code of launch_on_hosts() when a host is lost: start the same command again (EX_TEMPFAIL).
inline constexpr int kHostLost = 75;

/// The same on several hosts, in rounds. Each host calls it with equal `hosts`, `ranks` and key (`key_file`, or
/// DDPKIT_KEY_FILE). Host ranks follow the order of arrival. The first failure on any host ends the round on all hosts.
/// The next round starts all ranks again: after the failure of a rank up to `max_restarts` times, after the loss of a
/// host if `min_hosts` remain. Ignores `nodes`, `node_rank`, `master_addr`, `master_port`, `run_id`, `restart_count`
/// and `max_restarts` of `options`. Returns the exit code for a shell: 0; the code of the first failure as in
/// LaunchResult::exit_code(); 1 if too few hosts came; kHostLost. Throws InvalidArgument for wrong options or without a
/// key, RendezvousError if host 0 cannot be reached or refuses this launcher.
int launch_on_hosts(const LaunchOptions& options, const HostOptions& hosts);

}  // namespace ddpkit
