// Tier 0: the standard library only.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <ddpkit/scaling/all_reduce.h>

namespace ddpkit::scaling {

/// GPU generations in NCCL's terms. The order is that of the rows of NCCL's tables.
enum class GpuGeneration {
  kVolta,      ///< V100.
  kAmpere,     ///< A100.
  kHopper,     ///< H100, H200.
  kBlackwell,  ///< B200.
};

/// Identical GPU nodes in a network. Holds the values that NCCL detects from the hardware (shown by
/// `NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=GRAPH,TUNING`). Bandwidths are in 10^9 bytes per second.
struct GpuCluster {
  std::string name;                                   ///< See gpu_clusters().
  GpuGeneration generation = GpuGeneration::kHopper;  ///< Selects the row of NCCL's tables.
  int gpus_per_node = 8;                              ///< GPUs.
  bool nvlink = true;                                 ///< False: PCIe.
  int channels = 24;                                  ///< Parallel rings and trees within a node.
  double node_GBps = 360;  ///< Bandwidth of all channels together: the bus bandwidth of a ring.
  int nvls_channels = 0;   ///< Channels of the search graph for reduction in the NVLink switch (NVLS); 0: no NVLS.
  double nvls_channel_GBps = 0;         ///< Bandwidth of one NVLS channel.
  int network_channels = 16;            ///< Channels between nodes.
  double network_GBps = 0;              ///< Bandwidth of a node's network cards together, per direction; 0: one node.
  double network_latency_us = 0;        ///< Latency of a card in addition to the network latency in NCCL's table.
  double launch_us = 4;                 ///< Time until the kernel runs: see docs/scaling.md.
  int multiprocessors = 132;            ///< Per GPU.
  int collective_multiprocessors = 16;  ///< Used by an all-reduce.
  double price_per_hour = 0;            ///< Per GPU; 0: unknown.
};

/// Returns the named clusters: "h100" (HGX H100 and H200, 8 x 400 Gb/s InfiniBand), "h100-ethernet" (8 x 100 Gb/s),
/// "b200", "a100" (8 x 200 Gb/s), "v100" (DGX-1 with 4 x 100 Gb/s), "pcie" (8 GPUs on PCIe 4.0, 100 Gb/s).
const std::vector<GpuCluster>& gpu_clusters();
/// Returns the cluster with that name. Throws std::invalid_argument for an unknown name; the error lists the names.
const GpuCluster& gpu_cluster(std::string_view name);

/// Returns the smallest factor by which compute is slower during an all-reduce: StepOptions::contention.
double contention(const GpuCluster& cluster);

/// NCCL's all-reduce by NCCL's cost model: T = latency + n / bandwidth for each algorithm and protocol, and the fastest
/// of them (NVIDIA/nccl 2.30, src/graph/tuning.cc: all constants of latency and bandwidth). Adds the launch time. With
/// NVLS, also applies the efficiency that was measured at 1 to 512 MB, because NCCL's model predicts up to 1.5 times
/// too much. Ranks fill one node after the other.
AllReduceModel nccl(const GpuCluster& cluster);

}  // namespace ddpkit::scaling
