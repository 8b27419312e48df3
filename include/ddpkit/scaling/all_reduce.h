// Tier 0: the standard library only.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace ddpkit::scaling {

/// What a model of all-reduce says of one.
struct AllReduceTime {
  double us = 0;          ///< Microseconds.
  std::string algorithm;  ///< By which it would be done: "ring", "NVLS".
};

/// The time of an all-reduce of `bytes` on each of `ranks` ranks, in place, with nothing else going on. 0 on one rank.
using AllReduceModel = std::function<AllReduceTime(double bytes, int ranks)>;

/// Links of one kind between all ranks, by the alpha-beta model (Hockney 1994; the algorithms' costs as in Thakur et
/// al. 2005, "Optimization of Collective Communication Operations in MPICH", section 4).
struct AlphaBeta {
  double alpha_us = 5;         ///< Of one message, whatever its size.
  double bandwidth_GBps = 12;  ///< Of one link, each way, in 10^9 bytes a second.
  double reduce_GBps = 0;      ///< At which a rank adds up what it has received; 0: it costs nothing.
};

/// 2 (p - 1) messages of n / p bytes one after the other.
AllReduceModel ring(const AlphaBeta& link);
/// Recursive halving and doubling (Rabenseifner 2004): 2 log2 p messages for the same bytes as the ring's.
AllReduceModel halving_doubling(const AlphaBeta& link);
/// Double binary tree (Sanders et al. 2009), pipelined: 2 log2 p messages, each rank sends and receives n twice.
AllReduceModel double_tree(const AlphaBeta& link);
/// A switch that adds up what passes through it: a rank sends n and receives n at once.
AllReduceModel in_switch(const AlphaBeta& link);
/// Whichever is the fastest for each size.
AllReduceModel fastest(std::vector<AllReduceModel> models);

/// CPU ranks of one host on shared memory, each reducing its slice of all ranks' buffers in place: two barriers, and
/// 2 n bytes read and written a rank, which is the least there can be (docs/shared-memory.md).
struct SharedMemory {
  double barrier_us = 0.5;
  double rank_GBps = 20;   ///< At which one rank reads and writes.
  double host_GBps = 200;  ///< At which all ranks together do.
};
AllReduceModel shared_memory(const SharedMemory& memory);

/// `inside` among the `ranks_per_host` ranks of each host, `between` among the hosts' first ranks: a reduction to the
/// first rank, an all-reduce among these and a broadcast, of which the first and the last cost half of `inside` each.
AllReduceModel hierarchical(AllReduceModel inside, AllReduceModel between, int ranks_per_host);

/// A measured size.
struct AllReducePoint {
  double bytes = 0;
  double us = 0;
};
/// Between the measured sizes a straight line in time over bytes; beyond the largest at its bandwidth, below the
/// smallest its time. For `ranks` ranks, as measured; throws std::invalid_argument for another number, without points,
/// and for points that are not positive.
AllReduceModel measured(std::vector<AllReducePoint> points, int ranks);

/// All-reduce's bus bandwidth in 10^9 bytes a second, as nccl-tests define it: bytes / time * 2 (ranks - 1) / ranks.
double bus_GBps(double bytes, double us, int ranks);

}  // namespace ddpkit::scaling
