#include <ddpkit/comm/environment.h>

#include <chrono>
#include <map>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/comm/shm_backend.h>
#include <ddpkit/error.h>

#include "comm/device_index.h"
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

TEST_CASE("the key of the store", "[environment]") {
  const auto rank = [](std::map<std::string, std::string> more) {
    more.insert({{"RANK", "0"}, {"WORLD_SIZE", "2"}});
    return read(more);
  };
  CHECK(!rank({}).key_descriptor);
  CHECK(rank({}).key_file.empty());
  CHECK(rank({{"DDPKIT_KEY_FD", "7"}}).key_descriptor == 7);
  CHECK(rank({{"DDPKIT_KEY_FILE", "/key"}}).key_file == "/key");
  // Under `ddpkit run`, another launcher has its own store.
  CHECK(!rank({{"DDPKIT_KEY_FD", "7"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}}).key_descriptor);
  const auto mpi = read({{"PMI_RANK", "1"},
                         {"PMI_SIZE", "2"},
                         {"MPI_LOCALNRANKS", "2"},
                         {"DDPKIT_KEY_FD", "7"},
                         {"DDPKIT_KEY_FILE", "/key"}});
  CHECK(!mpi.key_descriptor);
  CHECK(mpi.key_file == "/key");
  check_refused({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"DDPKIT_KEY_FD", "x"}}, "DDPKIT_KEY_FD is \"x\"");
  check_refused(
      {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"DDPKIT_KEY_FILE", "/key"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}},
      "torchrun serves the store, which has no key");
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
  // A batch script's shell is no Slurm step: one process, not a world that no other process joins.
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

TEST_CASE("the variables of MPICH, Intel MPI and Cray", "[environment]") {
  // As Hydra of MPICH 5.0.2 sets them.
  const std::map<std::string, std::string> hydra = {
      {"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"PMI_FD", "9"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
  const auto environment = read(hydra);
  CHECK(environment.rank == 1);
  CHECK(environment.world_size == 2);
  CHECK(environment.local_rank == 1);
  CHECK(environment.local_world_size == 2);
  CHECK(environment.master_addr == "127.0.0.1");
  CHECK(environment.launcher == "pmi");
  const auto cray = read({{"PMI_RANK", "5"},
                          {"PMI_SIZE", "8"},
                          {"PMI_LOCAL_RANK", "1"},
                          {"PMI_LOCAL_SIZE", "4"},
                          {"MASTER_ADDR", "nid1"},
                          {"PALS_RANKID", "5"}});
  CHECK(cray.rank == 5);
  CHECK(cray.local_rank == 1);
  CHECK(cray.local_world_size == 4);
  CHECK(cray.master_addr == "nid1");
  check_refused({{"PMI_RANK", "1"}}, "PMI_SIZE is not set, but PMI_RANK is");
  check_refused({{"PMI_SIZE", "2"}}, "PMI_RANK is not set, but PMI_SIZE is");
  check_refused({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}, "PMI_SIZE is 2, but no variable holds");
  CHECK(read({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "2"}}).local_rank == 1);
  check_refused({{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}, {"MPI_LOCALNRANKS", "2"}}, "mpiexec -genv MASTER_ADDR HOST");
  CHECK(read({{"MV2_COMM_WORLD_RANK", "3"},
              {"MV2_COMM_WORLD_SIZE", "4"},
              {"MV2_COMM_WORLD_LOCAL_RANK", "3"},
              {"MV2_COMM_WORLD_LOCAL_SIZE", "4"}})
            .rank == 3);
}

TEST_CASE("the variables of Flux", "[environment]") {
  std::map<std::string, std::string> flux = {
      {"FLUX_TASK_RANK", "3"},  {"FLUX_JOB_SIZE", "4"}, {"FLUX_TASK_LOCAL_ID", "3"},
      {"FLUX_JOB_NNODES", "1"}, {"FLUX_JOB_ID", "f9"},  {"PMI_RANK", "3"},
      {"PMI_SIZE", "4"}};
  CHECK(read(flux).rank == 3);
  CHECK(read(flux).local_world_size == 4);
  CHECK(read(flux).run_id == "f9/0");
  flux["FLUX_JOB_NNODES"] = "2";
  check_refused(flux, "FLUX_JOB_SIZE is 4, but no variable holds");
}

TEST_CASE("an MPI launcher in a Slurm allocation", "[environment]") {
  // Slurm's variables describe the daemon on this host.
  const auto environment = read({{"OMPI_COMM_WORLD_RANK", "3"},
                                 {"OMPI_COMM_WORLD_SIZE", "4"},
                                 {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                 {"MASTER_ADDR", "node0"},
                                 {"SLURM_STEP_NUM_TASKS", "1"},
                                 {"SLURM_PROCID", "0"}});
  CHECK(environment.rank == 3);
  CHECK(environment.launcher == "openmpi");
  // srun --mpi=pmi2 sets both. Slurm's variables contain more.
  const auto step = read({{"PMI_RANK", "3"},
                          {"PMI_SIZE", "4"},
                          {"SLURM_STEP_NUM_TASKS", "4"},
                          {"SLURM_PROCID", "3"},
                          {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
                          {"SLURM_NODEID", "1"},
                          {"SLURM_LOCALID", "1"},
                          {"SLURM_STEP_NODELIST", "n[1-2]"}});
  CHECK(step.launcher == "slurm");
  CHECK(step.master_addr == "n1");
}

TEST_CASE("several ranks never become several worlds of one", "[environment]") {
  check_refused({{"PMIX_RANK", "1"}, {"PMIX_NAMESPACE", "prterun-1"}}, "PMIX_RANK is 1, so a launcher");
  check_refused({{"ALPS_APP_PE", "1"}}, "set RANK, WORLD_SIZE, LOCAL_RANK");
  check_refused({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"PMI_RANK", "1"}, {"PMI_SIZE", "2"}},
                "WORLD_SIZE is 1, but PMI_SIZE is 2");
  check_refused({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"SLURM_STEP_NUM_TASKS", "8"}},
                "WORLD_SIZE is 1, but SLURM_STEP_NUM_TASKS is 8");
  // One job per task: `srun ddpkit run -n 1`.
  CHECK(read({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"TORCHELASTIC_RUN_ID", "local-7"}, {"SLURM_STEP_NUM_TASKS", "8"}})
            .world_size == 1);
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

TEST_CASE("a CUDA device without an index is that of the local rank", "[environment]") {
  const c10::Device cuda(c10::kCUDA);
  CHECK(ddpkit::with_index(cuda, 2) == c10::Device(c10::kCUDA, 2));
  CHECK(ddpkit::with_index(c10::Device(c10::kCUDA, 1), 2) == c10::Device(c10::kCUDA, 1));
  CHECK(ddpkit::with_index(c10::kCPU, 2) == c10::Device(c10::kCPU));

  LaunchEnvironment environment;
  environment.rank = 7;
  environment.world_size = 8;
  environment.local_rank = 3;
  environment.local_world_size = 4;
  const auto device = [&](std::optional<c10::Device> wanted, const char* backend, int gpus) {
    return ddpkit::device_of_rank(wanted, backend, environment, gpus);
  };
  CHECK(device({}, "nccl", 4) == c10::Device(c10::kCUDA, 3));
  CHECK(device({}, "shm", 4) == c10::kCPU);
  for (const char* backend : {"nccl", "shm"}) {
    CHECK(device(cuda, backend, 4) == c10::Device(c10::kCUDA, 3));
    CHECK(device(c10::Device(c10::kCUDA, 0), backend, 4) == c10::Device(c10::kCUDA, 0));
    CHECK_THROWS_WITH(device(cuda, backend, 3), ContainsSubstring("rank 7 is number 3 on this host, which has 3 GPUs"));
  }
  CHECK(device(c10::kCPU, "shm", 0) == c10::kCPU);

  const auto store = c10::make_intrusive<c10d::HashStore>();
  const ddpkit::ProcessGroup group(ddpkit::create_shm_backend(store, 0, 1, std::chrono::seconds(60)), store, cuda,
                                   environment);
  CHECK(group.device() == c10::Device(c10::kCUDA, 3));
}

TEST_CASE("options that a backend does not support are refused without the other ranks", "[environment]") {
  const auto refusal = [](ddpkit::InitOptions options, int ranks_of_host = 2) {
    // Rank 1 does not exist. A connection would be a Timeout.
    options.environment =
        LaunchEnvironment{.world_size = 2, .local_world_size = ranks_of_host, .master_port = 1, .run_id = ""};
    options.timeout = std::chrono::seconds(1);
    try {
      ddpkit::init_process_group(options);
    } catch (const ddpkit::InvalidArgument& error) {
      return std::string(error.what());
    } catch (const ddpkit::Error& error) {
      return "another error: " + std::string(error.what());
    }
    return std::string("no error");
  };
  CHECK_THAT(refusal({.backend = "hierarchical", .elastic = true}),
             ContainsSubstring("a hierarchical group cannot continue without a lost rank"));
  CHECK_THAT(refusal({.backend = "shm", .device = at::kCUDA, .elastic = true}),
             ContainsSubstring("a shm group cannot continue without a lost rank"));
  CHECK_THAT(refusal({.backend = "gloo", .elastic = true}, 1),
             ContainsSubstring("only on one host, but 1 of 2 ranks are on this host"));
  CHECK_THAT(refusal({.backend = "hierarchical", .device = at::kCUDA}), ContainsSubstring("supports only the CPU"));
  CHECK_THAT(refusal({.backend = "nccl", .device = at::kCPU}), ContainsSubstring("nccl backend"));
}
