// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace ddpkit {

/// Who this process is among the ranks of a job, as its launcher says in the environment.
struct LaunchEnvironment {
  int rank = 0;                           ///< 0 .. world_size-1.
  int local_rank = 0;                     ///< Position among the ranks of this host: 0 .. local_world_size-1.
  int world_size = 1;                     ///< Ranks in the job.
  int local_world_size = 1;               ///< Ranks on this host.
  std::string master_addr = "127.0.0.1";  ///< Host of the rendezvous store.
  std::uint16_t master_port = 29500;      ///< TCP port of the rendezvous store.
  bool use_agent_store = false;   ///< The launcher itself serves the store (torchrun): no rank may bind the port.
  std::string run_id;             ///< Keeps the keys of one run apart from another's, and of one restart.
  std::string launcher = "none";  ///< Whose variables were read: torchrun, slurm, openmpi, mvapich, flux, pmi, none.
};

/// Looks up one environment variable; empty optional when it is not set.
using EnvironmentLookup = std::function<std::optional<std::string>(const char* name)>;

/// Reads the launcher's variables: torchrun's (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR,
/// MASTER_PORT, TORCHELASTIC_USE_AGENT_STORE; `ddpkit run` sets the same). Without RANK and WORLD_SIZE: an MPI
/// launcher's (OMPI_COMM_WORLD_RANK, PMI_RANK, ...) or Slurm's (SLURM_PROCID, ...). A world of one when none is set.
/// Throws InvalidArgument that names the variable and its value if a variable is missing, is no number or contradicts
/// another variable, and for a launcher that sets a rank without the number of ranks.
LaunchEnvironment read_launch_environment(const EnvironmentLookup& lookup);

/// The same from this process's environment.
LaunchEnvironment read_launch_environment();

/// Cores that this process may use, from its affinity mask.
int available_cores();

/// First host of a Slurm node list: "gpu[003-008,12],login1" gives "gpu003".
std::string first_slurm_host(const std::string& node_list);

}  // namespace ddpkit
