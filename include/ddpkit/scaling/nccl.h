// Tier 0: the standard library only.
#pragma once

#include <string>
#include <vector>

#include <ddpkit/scaling/all_reduce.h>

namespace ddpkit::scaling {

/// GPUs, in NCCL's words; the order is that of the rows of its tables.
enum class GpuGeneration { kVolta, kAmpere, kHopper, kBlackwell };

/// Nodes of GPUs that are all alike, joined by a network. What NCCL finds out by looking at the hardware (`NCCL_DEBUG=
/// INFO NCCL_DEBUG_SUBSYS=GRAPH,TUNING` shows it) is given here. Bandwidths in 10^9 bytes a second.
struct GpuCluster {
  std::string name;
  GpuGeneration generation = GpuGeneration::kHopper;
  int gpus_per_node = 8;
  bool nvlink = true;      ///< Otherwise PCIe.
  int channels = 24;       ///< Rings and trees that NCCL runs side by side in a node.
  double node_GBps = 360;  ///< Of all of them together: a ring's bus bandwidth.
  int nvls_channels = 0;   ///< Of the search graph, where the NVLink switch reduces (NVLS); 0: it does not.
  double nvls_channel_GBps = 0;
  int network_channels = 16;            ///< Between nodes.
  double network_GBps = 0;              ///< Of a node's network cards together, each way; 0: there is one node.
  double network_latency_us = 0;        ///< Of a card, beyond what NCCL's table has for the network.
  double launch_us = 4;                 ///< Until the kernel runs: see docs/scaling.md.
  int multiprocessors = 132;            ///< Of one GPU.
  int collective_multiprocessors = 16;  ///< That an all-reduce occupies.
  double price_per_hour = 0;            ///< Of one GPU; 0: unknown.
};

/// The named clusters: "h100" (HGX H100 and H200, 8 x 400 Gb/s InfiniBand), "h100-ethernet" (8 x 100 Gb/s), "b200",
/// "a100" (8 x 200 Gb/s), "v100" (DGX-1 with 4 x 100 Gb/s), "pcie" (8 GPUs on PCIe 4.0, 100 Gb/s).
const std::vector<GpuCluster>& gpu_clusters();
/// Throws std::invalid_argument, with the names that there are.
const GpuCluster& gpu_cluster(const std::string& name);

/// How much longer compute takes while an all-reduce is under way, at the least: StepOptions::contention.
double contention(const GpuCluster& cluster);

/// NCCL's all-reduce by NCCL's own cost model: T = latency + n / bandwidth of each algorithm and protocol, of which it
/// takes the fastest (NVIDIA/nccl 2.30, src/graph/tuning.cc: all constants of latency and bandwidth). To it come the
/// launch, and on NVLS the efficiency that was measured at 1 to 512 MB, where that model promises up to 1.5 times too
/// much. Ranks fill one node after the other.
AllReduceModel nccl(const GpuCluster& cluster);

}  // namespace ddpkit::scaling
