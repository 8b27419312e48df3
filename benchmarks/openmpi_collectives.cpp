// Runs the collectives of `ddpkit bench collectives` with Open MPI. That command starts this program with mpirun and
// copies its rows. To run it alone: mpirun -n 2 build/bin/openmpi_collectives --collective all_reduce
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

#include <algorithm>
#include <iostream>
#include <limits>

#include "bench/collective.h"
#include "bench/plan.h"
#include "bench/row.h"

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

struct MpiCall {
  const char* name;
  void (*call)(const Call& c);
};

const std::vector<MpiCall>& mpi_calls() {
  static const std::vector<MpiCall> calls = {
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

Row measure(const MpiCall& call, std::uint64_t wanted_bytes, const TimingOptions& timing) {
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
  return {call.name, "openmpi", ranks, bytes, "private", us, wrong};
}

int run(const Plan& plan) {
  MPI_Init(nullptr, nullptr);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank == 0) std::cout << kCsvHeader << ",wrong" << std::endl;
  for (const MpiCall& call : mpi_calls()) {
    const auto& names = plan.collectives;
    if (!names.empty() && std::find(names.begin(), names.end(), call.name) == names.end()) continue;
    for (const std::uint64_t bytes : plan.sizes()) {
      const Row row = measure(call, bytes, plan.timing);
      if (rank == 0) std::cout << to_report(row) << std::endl;
    }
  }
  MPI_Finalize();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  ddpkit::train::Options options("openmpi_collectives",
                                 "The collectives of ddpkit bench collectives with Open MPI; run it under mpirun");
  Plan plan;
  declare(options, plan);
  try {
    if (const std::string help = options.parse(argc, argv); !help.empty()) return std::cout << help, 0;
    for (const std::string& name : plan.collectives) find_collective(name);
    plan.sizes();
  } catch (const std::exception& error) {
    std::cerr << "openmpi_collectives: " << error.what() << '\n';
    return 2;
  }
  return run(plan);
}
