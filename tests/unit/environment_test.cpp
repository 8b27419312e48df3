#include <ddpkit/comm/environment.h>

#include <map>

#include <ddpkit/comm/error.h>

#include "support/catch.h"

using ddpkit::LaunchEnvironment;

namespace {

LaunchEnvironment read(const std::map<std::string, std::string>& variables) {
  return ddpkit::read_launch_environment([&](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

void check_refused(const std::map<std::string, std::string>& variables, const std::string& text) {
  CHECK_THROWS_AS(read(variables), ddpkit::InvalidArgument);
  CHECK_THROWS_WITH(read(variables), ContainsSubstring(text));
}

}  // namespace

TEST_CASE("no launcher is a world of one", "[environment]") {
  const auto environment = read({{"PATH", "/bin"}});
  CHECK(environment.world_size == 1);
  CHECK(environment.rank == 0);
  CHECK(environment.launcher == "none");
}

TEST_CASE("torchrun's variables", "[environment]") {
  const auto environment = read({{"RANK", "5"},
                                 {"LOCAL_RANK", "1"},
                                 {"WORLD_SIZE", "8"},
                                 {"LOCAL_WORLD_SIZE", "4"},
                                 {"MASTER_ADDR", "node7"},
                                 {"MASTER_PORT", "1234"},
                                 {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                 {"TORCHELASTIC_RESTART_COUNT", "2"}});
  CHECK(environment.rank == 5);
  CHECK(environment.local_rank == 1);
  CHECK(environment.world_size == 8);
  CHECK(environment.local_world_size == 4);
  CHECK(environment.master_addr == "node7");
  CHECK(environment.master_port == 1234);
  CHECK(environment.use_agent_store);
  CHECK(environment.run_id == "none/2");
  CHECK(read({{"RANK", "0"}, {"WORLD_SIZE", "2"}}).master_port == 29500);
}

TEST_CASE("Slurm's variables", "[environment]") {
  const auto environment = read({{"SLURM_PROCID", "5"},
                                 {"SLURM_LOCALID", "1"},
                                 {"SLURM_NODEID", "2"},
                                 {"SLURM_STEP_NUM_TASKS", "6"},
                                 {"SLURM_STEP_TASKS_PER_NODE", "2(x3)"},
                                 {"SLURM_STEP_NODELIST", "gpu[003-008,12],login1"},
                                 {"SLURM_JOB_ID", "77"}});
  CHECK(environment.rank == 5);
  CHECK(environment.local_rank == 1);
  CHECK(environment.world_size == 6);
  CHECK(environment.local_world_size == 2);
  CHECK(environment.master_addr == "gpu003");
  CHECK(environment.launcher == "slurm");
  // A batch script's own shell is no step: one process, not a world that nobody else joins.
  CHECK(read({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}}).world_size == 1);
}

TEST_CASE("the first host of a Slurm node list", "[environment]") {
  CHECK(ddpkit::first_slurm_host("node1") == "node1");
  CHECK(ddpkit::first_slurm_host("a,b") == "a");
  CHECK(ddpkit::first_slurm_host("gpu[7,9]") == "gpu7");
  CHECK(ddpkit::first_slurm_host("r[1-2]n0,x") == "r1n0");
  CHECK_THROWS_AS(ddpkit::first_slurm_host("gpu[7"), ddpkit::InvalidArgument);
}

TEST_CASE("Open MPI's variables", "[environment]") {
  const auto environment = read({{"OMPI_COMM_WORLD_RANK", "3"},
                                 {"OMPI_COMM_WORLD_SIZE", "4"},
                                 {"OMPI_COMM_WORLD_LOCAL_RANK", "3"},
                                 {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}});
  CHECK(environment.rank == 3);
  CHECK(environment.world_size == 4);
  CHECK(environment.local_world_size == 4);
  CHECK(environment.launcher == "openmpi");
  check_refused({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}},
                "MASTER_ADDR");
}

TEST_CASE("wrong variables are named with their values", "[environment]") {
  check_refused({{"RANK", "0"}, {"WORLD_SIZE", "two"}}, "WORLD_SIZE is \"two\"");
  check_refused({{"RANK", "0"}, {"WORLD_SIZE", "2x"}}, "WORLD_SIZE is \"2x\"");
  check_refused({{"RANK", "0"}, {"WORLD_SIZE", "99999999999"}}, "WORLD_SIZE");
  check_refused({{"RANK", "0"}, {"WORLD_SIZE", "0"}}, "WORLD_SIZE is 0");
  check_refused({{"RANK", "2"}, {"WORLD_SIZE", "2"}}, "RANK is 2");
  check_refused({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}, "RANK is -1");
  check_refused({{"WORLD_SIZE", "2"}}, "RANK is not set");
  check_refused({{"RANK", "0"}}, "WORLD_SIZE is not set");
  check_refused({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_PORT", "70000"}}, "MASTER_PORT is 70000");
}
