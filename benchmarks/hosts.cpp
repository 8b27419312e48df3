// Measures all-reduce over several hosts with each backend in turn, on all ranks that a launcher starts:
//
//     ddpkit run --nnodes 2 --node-rank 0|1 --nproc-per-node 2 --master-addr HOST --master-port PORT -- bench_hosts
//     BACKEND
//
// Prints the median time per call for sizes from 4 KiB to 32 MiB. script/bench hosts runs it between network
// namespaces.
#include <torch/torch.h>

#include <iostream>

#include <fmt/format.h>

#include <ddpkit/ddpkit.h>
#include <ddpkit/train/main.h>

#include "bench/group_peers.h"
#include "bench/timing.h"

namespace {

void measure(const std::string& backend, ddpkit::train::Program& program) {
  torch::set_num_threads(1);
  const auto group = program.init_process_group({.backend = backend, .device = torch::Device(torch::kCPU)});
  ddpkit::bench::GroupPeers ranks(group);
  for (const std::int64_t kib : {4, 64, 1024, 4096, 32768}) {
    const torch::Tensor tensor = torch::ones({kib * 256});
    const double us = ddpkit::bench::median_us(ranks, [&] { group.all_reduce(tensor, ddpkit::ReduceOp::kMax); },
                                               {.iterations = kib >= 4096 ? 20 : 200, .warmup = 3});
    if (group.rank() == 0) std::cout << fmt::format("{} {:.1f}\n", kib * 1024, us) << std::flush;
  }
  group.barrier();
}

}  // namespace

int main(int argc, char** argv) {
  ddpkit::train::Options options("bench_hosts", "All-reduce on all ranks that a launcher starts, for several sizes.");
  std::string backend;
  options.add("backend", &backend, "gloo or hierarchical").positional().required();
  return ddpkit::train::run_main(options, argc, argv,
                                 [&](ddpkit::train::Program& program) { measure(backend, program); });
}
