#include <ddpkit/comm/environment.h>

#include <charconv>
#include <cstdlib>
#include <limits>
#include <vector>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/parse_number.h>

#include "comm/trace/event_ring.h"

namespace ddpkit {
namespace {

/// Reads numbers from environment variables. Errors name the variable.
class Variables {
 public:
  explicit Variables(const EnvironmentLookup& lookup) : lookup_(lookup) {}

  /// An empty variable counts as not set.
  std::optional<std::string> text(const char* name) const {
    auto value = lookup_(name);
    if (value && value->empty()) return std::nullopt;
    return value;
  }

  std::optional<int> number(const char* name, int low, int high) const {
    const auto value = text(name);
    if (!value) return std::nullopt;
    int number = 0;
    if (!parse_number(*value, number))
      throw InvalidArgument(fmt::format("{} is \"{}\", which is not a whole number", name, *value));
    if (number < low || number > high) {
      throw InvalidArgument(high == std::numeric_limits<int>::max()
                                ? fmt::format("{} is {}, but must be at least {}", name, number, low)
                                : fmt::format("{} is {}, but must be between {} and {}", name, number, low, high));
    }
    return number;
  }

  int required(const char* name, int low, int high, const char* because) const {
    if (const auto value = number(name, low, high)) return *value;
    throw InvalidArgument(fmt::format("{} is not set, but {} is: a launcher sets both", name, because));
  }

 private:
  const EnvironmentLookup& lookup_;
};

constexpr int kAny = std::numeric_limits<int>::max();

void read_master(const Variables& variables, LaunchEnvironment& environment) {
  if (const auto address = variables.text("MASTER_ADDR")) environment.master_addr = *address;
  if (const auto port = variables.number("MASTER_PORT", 1, 65535))
    environment.master_port = static_cast<std::uint16_t>(*port);
}

LaunchEnvironment read_torchrun(const Variables& variables) {
  LaunchEnvironment environment;
  environment.launcher = "torchrun";
  environment.world_size = variables.required("WORLD_SIZE", 1, kAny, "RANK");
  environment.rank = variables.required("RANK", 0, environment.world_size - 1, "WORLD_SIZE");
  const auto local_world_size = variables.number("LOCAL_WORLD_SIZE", 1, environment.world_size);
  environment.local_world_size = local_world_size.value_or(environment.world_size);
  const auto local_rank = variables.number("LOCAL_RANK", 0, environment.local_world_size - 1);
  environment.local_rank = local_rank.value_or(environment.rank % environment.local_world_size);
  read_master(variables, environment);
  environment.use_agent_store = variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  // Another launcher between `ddpkit run` and this rank has its own store.
  if (!environment.use_agent_store) environment.key_descriptor = variables.number("DDPKIT_KEY_FD", 0, kAny);
  environment.replaces = variables.text(kReplacesVariable) == "1";
  environment.run_id = variables.text("TORCHELASTIC_RUN_ID").value_or("none") + "/" +
                       variables.text("TORCHELASTIC_RESTART_COUNT").value_or("0");
  return environment;
}

/// Parses the format "2(x3),1", which means the tasks per node 2, 2, 2, 1.
int slurm_tasks_on_node(const std::string& text, int node) {
  int index = 0;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at < end) {
    int tasks = 0, repeat = 1;
    auto parsed = std::from_chars(at, end, tasks);
    if (parsed.ec != std::errc{}) break;
    at = parsed.ptr;
    if (end - at > 2 && at[0] == '(' && at[1] == 'x') {
      parsed = std::from_chars(at + 2, end, repeat);
      if (parsed.ec != std::errc{} || parsed.ptr == end || *parsed.ptr != ')') break;
      at = parsed.ptr + 1;
    }
    if (node < index + repeat) return tasks;
    index += repeat;
    if (at < end && *at == ',') ++at;
  }
  throw InvalidArgument(
      fmt::format("SLURM_STEP_TASKS_PER_NODE is \"{}\", which has no task count for node {}", text, node));
}

LaunchEnvironment read_slurm(const Variables& variables) {
  LaunchEnvironment environment;
  environment.launcher = "slurm";
  environment.world_size = variables.required("SLURM_STEP_NUM_TASKS", 1, kAny, "SLURM_PROCID");
  environment.rank = variables.required("SLURM_PROCID", 0, environment.world_size - 1, "SLURM_STEP_NUM_TASKS");
  environment.local_rank = variables.number("SLURM_LOCALID", 0, environment.world_size - 1).value_or(environment.rank);
  const int node = variables.number("SLURM_NODEID", 0, kAny).value_or(0);
  const auto per_node = variables.text("SLURM_STEP_TASKS_PER_NODE");
  environment.local_world_size = per_node ? slurm_tasks_on_node(*per_node, node) : environment.world_size;
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}) {
    if (const auto nodes = variables.text(name); nodes && environment.local_world_size < environment.world_size) {
      environment.master_addr = first_slurm_host(*nodes);
      break;
    }
  }
  read_master(variables, environment);
  environment.run_id =
      variables.text("SLURM_JOB_ID").value_or("none") + "/" + variables.text("SLURM_STEP_ID").value_or("0");
  return environment;
}

/// The variables of a launcher that starts processes for MPI. Such a program need not use MPI.
struct MpiLauncher {
  const char* name;
  const char* rank;
  const char* size;
  const char* local_ranks[2];  ///< The first that is set counts; the same for local_sizes.
  const char* local_sizes[2];
  const char* hosts;   ///< Number of hosts.
  const char* job;     ///< Identifies the job.
  const char* option;  ///< How to pass MASTER_ADDR to all ranks.
};

constexpr MpiLauncher kMpiLaunchers[] = {
    {.name = "openmpi",
     .rank = "OMPI_COMM_WORLD_RANK",
     .size = "OMPI_COMM_WORLD_SIZE",
     .local_ranks = {"OMPI_COMM_WORLD_LOCAL_RANK"},
     .local_sizes = {"OMPI_COMM_WORLD_LOCAL_SIZE"},
     .hosts = nullptr,
     .job = "PMIX_NAMESPACE",
     .option = "mpirun -x MASTER_ADDR=HOST"},
    {.name = "mvapich",
     .rank = "MV2_COMM_WORLD_RANK",
     .size = "MV2_COMM_WORLD_SIZE",
     .local_ranks = {"MV2_COMM_WORLD_LOCAL_RANK"},
     .local_sizes = {"MV2_COMM_WORLD_LOCAL_SIZE"},
     .hosts = nullptr,
     .job = nullptr,
     .option = "mpiexec -genv MASTER_ADDR HOST"},
    {.name = "flux",
     .rank = "FLUX_TASK_RANK",
     .size = "FLUX_JOB_SIZE",
     .local_ranks = {"FLUX_TASK_LOCAL_ID"},
     .local_sizes = {},
     .hosts = "FLUX_JOB_NNODES",
     .job = "FLUX_JOB_ID",
     .option = "flux run --env=MASTER_ADDR=HOST"},
    // Hydra of MPICH and Intel MPI; Cray's PALS.
    {.name = "pmi",
     .rank = "PMI_RANK",
     .size = "PMI_SIZE",
     .local_ranks = {"MPI_LOCALRANKID", "PMI_LOCAL_RANK"},
     .local_sizes = {"MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"},
     .hosts = nullptr,
     .job = nullptr,
     .option = "mpiexec -genv MASTER_ADDR HOST"},
};

/// Variables of launchers that do not set the number of ranks.
constexpr const char* kRanksWithoutSize[] = {"PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE"};

const MpiLauncher* find_mpi_launcher(const Variables& variables) {
  for (const MpiLauncher& launcher : kMpiLaunchers) {
    if (variables.text(launcher.rank) || variables.text(launcher.size)) return &launcher;
  }
  return nullptr;
}

LaunchEnvironment read_mpi(const Variables& variables, const MpiLauncher& launcher) {
  LaunchEnvironment environment;
  environment.launcher = launcher.name;
  environment.world_size = variables.required(launcher.size, 1, kAny, launcher.rank);
  environment.rank = variables.required(launcher.rank, 0, environment.world_size - 1, launcher.size);
  const auto first_of = [&](const char* const(&names)[2], const char* last, int low, int high) {
    for (const char* name : {names[0], names[1], last}) {
      if (!name) continue;
      if (const auto value = variables.number(name, low, high)) return value;
    }
    return std::optional<int>();
  };
  auto local_size = first_of(launcher.local_sizes, "LOCAL_WORLD_SIZE", 1, environment.world_size);
  const bool is_one_host =
      environment.world_size == 1 || (launcher.hosts && variables.number(launcher.hosts, 1, kAny) == 1);
  if (!local_size && is_one_host) local_size = environment.world_size;
  if (!local_size)
    throw InvalidArgument(
        fmt::format("{} is {}, but no variable holds the number of ranks on this host: set LOCAL_WORLD_SIZE",
                    launcher.size, environment.world_size));
  environment.local_world_size = *local_size;
  environment.local_rank =
      first_of(launcher.local_ranks, "LOCAL_RANK", 0, *local_size - 1).value_or(environment.rank % *local_size);
  if (environment.local_world_size < environment.world_size && !variables.text("MASTER_ADDR")) {
    throw InvalidArgument(
        fmt::format("{} is {} and {} of these ranks run on this host, but MASTER_ADDR is not set: pass the host of "
                    "rank 0 with {}",
                    launcher.size, environment.world_size, environment.local_world_size, launcher.option));
  }
  read_master(variables, environment);
  environment.run_id = (launcher.job ? variables.text(launcher.job) : std::nullopt).value_or("none") + "/0";
  return environment;
}

/// Detects the launcher that started this process directly. In a Slurm allocation, mpirun and mpiexec start their
/// daemons with srun, and the ranks inherit the variables of the daemon's step. So Slurm's variables count only if they
/// are those of the rank.
LaunchEnvironment read_scheduler(const Variables& variables) {
  // In an allocation, Slurm also sets SLURM_PROCID and SLURM_NTASKS for the shell of a batch script. Only srun sets the
  // size of a step.
  const bool has_step = variables.text("SLURM_STEP_NUM_TASKS") && variables.text("SLURM_PROCID");
  const MpiLauncher* mpi = find_mpi_launcher(variables);
  const bool agree = has_step && mpi && variables.text("SLURM_STEP_NUM_TASKS") == variables.text(mpi->size) &&
                     variables.text("SLURM_PROCID") == variables.text(mpi->rank);
  if (has_step && (!mpi || agree)) return read_slurm(variables);
  if (mpi) return read_mpi(variables, *mpi);
  for (const char* name : kRanksWithoutSize) {
    if (const auto rank = variables.text(name))
      throw InvalidArgument(
          fmt::format("{} is {}, so a launcher started this process as a rank, but no variable holds the number of "
                      "ranks: set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or "
                      "unset {}",
                      name, *rank, name));
  }
  LaunchEnvironment environment;
  read_master(variables, environment);
  return environment;
}

/// Throws if the user has set a world size of 1 under a launcher of several ranks: each rank would train separately.
void refuse_worlds_of_one(const Variables& variables, const LaunchEnvironment& environment) {
  if (environment.world_size > 1 || variables.text("TORCHELASTIC_RUN_ID")) return;
  const MpiLauncher* mpi = find_mpi_launcher(variables);
  const char* size = mpi ? mpi->size : "SLURM_STEP_NUM_TASKS";
  if (const auto ranks = variables.text(size); ranks && *ranks != "1")
    throw InvalidArgument(
        fmt::format("WORLD_SIZE is 1, but {} is {}: unset RANK and WORLD_SIZE to train on {} ranks, or unset {}", size,
                    *ranks, *ranks, size));
}

}  // namespace

std::string first_slurm_host(const std::string& node_list) {
  const auto open = node_list.find_first_of("[,");
  if (open == std::string::npos || node_list[open] == ',') return node_list.substr(0, open);
  const auto end = node_list.find_first_of("-,]", open + 1);
  if (end == std::string::npos)
    throw InvalidArgument(fmt::format("the Slurm node list \"{}\" has a bracket that does not close", node_list));
  std::string host = node_list.substr(0, open) + node_list.substr(open + 1, end - open - 1);
  const auto close = node_list.find(']', open);
  if (close != std::string::npos) host += node_list.substr(close + 1, node_list.find(',', close) - close - 1);
  return host;
}

LaunchEnvironment read_launch_environment(const EnvironmentLookup& lookup) {
  const Variables variables(lookup);
  const bool is_torchrun = variables.text("RANK") || variables.text("WORLD_SIZE");
  LaunchEnvironment environment = is_torchrun ? read_torchrun(variables) : read_scheduler(variables);
  if (is_torchrun) refuse_worlds_of_one(variables, environment);
  environment.key_file = variables.text("DDPKIT_KEY_FILE").value_or("");
  if (environment.use_agent_store && !environment.key_file.empty())
    throw InvalidArgument(
        "DDPKIT_KEY_FILE is set, but torchrun serves the store, which has no key: start the ranks with `ddpkit run`, "
        "or "
        "unset DDPKIT_KEY_FILE");
  return environment;
}

LaunchEnvironment read_launch_environment() {
  return read_launch_environment([](const char* name) -> std::optional<std::string> {
    const char* value = std::getenv(name);
    return value ? std::optional<std::string>(value) : std::nullopt;
  });
}

}  // namespace ddpkit
