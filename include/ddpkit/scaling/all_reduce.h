// Tier 0: the standard library only.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace ddpkit::scaling {

/// Prediction for one all-reduce.
struct AllReduceTime {
  double us = 0;          ///< Microseconds.
  std::string algorithm;  ///< Algorithm: "ring", "NVLS".
};

/// Predicts the time of an in-place all-reduce of `bytes` per rank on `ranks` ranks, without other load. 0 for one
/// rank.
using AllReduceModel = std::function<AllReduceTime(double bytes, int ranks)>;

/// Equal links between all ranks in the alpha-beta model (Hockney 1994). The costs of the algorithms are those of
/// Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH", section 4.
struct AlphaBeta {
  double alpha_us = 5;         ///< Latency of one message of any size.
  double bandwidth_GBps = 12;  ///< Bandwidth of one link per direction, in 10^9 bytes per second.
  double reduce_GBps = 0;      ///< Speed at which a rank adds received data; 0: no cost.
};

/// Ring: 2 (p - 1) sequential messages of n / p bytes.
AllReduceModel ring(const AlphaBeta& link);
/// Recursive halving and doubling (Rabenseifner 2004): 2 log2 p messages with the same bytes as the ring.
AllReduceModel halving_doubling(const AlphaBeta& link);
/// Double binary tree (Sanders et al. 2009), pipelined: 2 log2 p messages, each rank sends and receives n twice.
AllReduceModel double_tree(const AlphaBeta& link);
/// Reduction in the switch: a rank sends n and receives n at the same time.
AllReduceModel in_switch(const AlphaBeta& link);
/// The fastest model for each size.
AllReduceModel fastest(std::vector<AllReduceModel> models);

/// CPU ranks of one host with shared memory. Each rank reduces its slice of all ranks' buffers in place: two barriers,
/// and 2 n bytes read and written per rank, which is the minimum (docs/shared-memory.md).
struct SharedMemory {
  double barrier_us = 0.5;  ///< Time of one barrier.
  double rank_GBps = 20;    ///< Read and write bandwidth of one rank.
  double host_GBps = 200;   ///< Read and write bandwidth of all ranks together.
};
/// See SharedMemory.
AllReduceModel shared_memory(const SharedMemory& memory);

/// Two levels: `inside` among the `ranks_per_host` ranks of each host, `between` among the hosts' first ranks. A
/// reduction to the first rank, an all-reduce between the first ranks, and a broadcast. Reduction and broadcast each
/// cost half of `inside`.
AllReduceModel hierarchical(AllReduceModel inside, AllReduceModel between, int ranks_per_host);

/// One measurement.
struct AllReducePoint {
  double bytes = 0;  ///< Per rank.
  double us = 0;     ///< Microseconds.
};
/// Interpolates measurements. Between the measured sizes, time is linear in bytes. Above the largest size, its
/// bandwidth applies; below the smallest size, its time. Only for the measured number of `ranks`. Throws
/// std::invalid_argument for another number of ranks, without points, and for points that are not positive.
AllReduceModel measured(std::vector<AllReducePoint> points, int ranks);

/// Returns the bus bandwidth in 10^9 bytes per second, defined as in nccl-tests: bytes / time * 2 (ranks - 1) / ranks.
double bus_GBps(double bytes, double us, int ranks);

}  // namespace ddpkit::scaling
