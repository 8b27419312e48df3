// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace ddpkit {

/// Rank and size of the job, from the launcher's environment variables.
struct LaunchEnvironment {
  int rank = 0;                           ///< 0 .. world_size-1.
  int local_rank = 0;                     ///< Position among the ranks of this host: 0 .. local_world_size-1.
  int world_size = 1;                     ///< Ranks in the job.
  int local_world_size = 1;               ///< Ranks on this host.
  std::string master_addr = "127.0.0.1";  ///< Host of the rendezvous store.
  std::uint16_t master_port = 29500;      ///< TCP port of the rendezvous store.
  bool use_agent_store = false;           ///< The launcher serves the store (torchrun). No rank may bind the port.
  /// Descriptor with the key of the store that the launcher serves (`ddpkit run`). Empty: see `key_file`.
  std::optional<int> key_descriptor = std::nullopt;
  std::string key_file = {};      ///< Key of the store that rank 0 serves. Empty: c10d's TCPStore, without a key.
  bool replaces = false;          ///< This process replaces a lost rank (`ddpkit run --max-replacements`).
  std::string run_id;             ///< Separates the store keys of runs, and of restarts of one run.
  std::string launcher = "none";  ///< torchrun, slurm, openmpi, mvapich, flux, pmi, or none.
};

/// Returns the value of one environment variable, or an empty optional if the variable is not set.
using EnvironmentLookup = std::function<std::optional<std::string>(const char* name)>;

/// Reads the launcher's variables. torchrun and `ddpkit run` set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
/// MASTER_ADDR, MASTER_PORT and TORCHELASTIC_USE_AGENT_STORE. DDPKIT_KEY_FD and DDPKIT_KEY_FILE give the key. Without
/// RANK and WORLD_SIZE, the variables of an MPI launcher (OMPI_COMM_WORLD_RANK, PMI_RANK, ...) or of Slurm
/// (SLURM_PROCID, ...) are read. Without any of them, the world size is 1. Throws InvalidArgument if a variable is
/// missing, is not a number or contradicts another variable, or if the launcher sets a rank but no number of ranks. The
/// error names the variable and its value.
LaunchEnvironment read_launch_environment(const EnvironmentLookup& lookup);

/// Reads the variables from this process's environment.
LaunchEnvironment read_launch_environment();

/// Returns the number of cores in this process's affinity mask.
int available_cores();

/// Returns the first host of a Slurm node list: "gpu[003-008,12],login1" gives "gpu003".
std::string first_slurm_host(const std::string& node_list);

}  // namespace ddpkit
