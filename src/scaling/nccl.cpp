#include <ddpkit/scaling/nccl.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>

#include <fmt/format.h>

namespace ddpkit::scaling {
namespace {

// All tables are from NCCL 2.30, src/graph/tuning.cc. Times in us, bandwidths in GB/s.

enum Protocol { kLL, kLL128, kSimple, kProtocols };
constexpr std::array<const char*, kProtocols> kProtocolNames = {"LL", "LL128", "Simple"};
using ByProtocol = std::array<double, kProtocols>;

constexpr ByProtocol kTreeBase = {6.8, 14, 8.4}, kRingBase = {6.6, 14, 8.4};

struct HopLatency {
  ByProtocol tree, ring;
};
constexpr HopLatency kNvlink = {{.6, 1.25, 4}, {.6, 1.9, 3.4}};
constexpr HopLatency kPcie = {{1, 1.9, 4}, {1, 2.5, 5.7}};
constexpr HopLatency kNetwork = {{5, 8.5, 14}, {2.7, 4, 14}};
constexpr double kNvlsLatency = 25, kNvlsTreeNetwork = 20.9;

// Caps by number of nodes: 1, 2, 4 and more. [generation][nodes]
using Caps = std::array<std::array<double, 3>, 4>;
constexpr Caps kLLMax = {{{39, 39, 20.4}, {87.7, 22.5, 19}, {141, 45, 35}, {282, 90, 70}}};
constexpr Caps kRingLL128 = {{{20, 20, 20}, {20, 20, 20}, {36.7, 36.7, 36.7}, {40, 40, 40}}};
constexpr Caps kTreeLL128 = {{{20, 20, 20}, {20, 20, 20}, {36.7, 36.7, 29}, {55.6, 31.67, 20}}};
constexpr Caps kTree = {{{26.5, 18.5, 10}, {24, 23.6, 17.8}, {38.7, 41.4, 36}, {70, 42.8, 24}}};
constexpr Caps kNvlsTree = {{{0, 0, 0}, {0, 0, 0}, {0, 57.7, 45.5}, {0, 96, 80}}};

// Correction factors of the tree model at medium sizes, for 64 B to 256 MB in powers of two.
constexpr std::array<std::array<double, 23>, kProtocols> kTreeCorrection = {{
    {1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1, 1},
    {1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .6, .6, .6, .8, .9, .9, .9, .9, 1, 1},
    {.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9},
}};

struct Size {
  double bytes, share;
};
// Modelled time over measured time of NVLS with eight H100: see docs/scaling.md. Linear interpolation over log(bytes).
constexpr std::array<Size, 6> kNvlsMeasured = {
    {{1 << 20, 1}, {2 << 20, .85}, {4 << 20, .73}, {8 << 20, .645}, {16 << 20, .66}, {512 << 20, 1}}};

double nvls_share(double bytes) {
  if (bytes <= kNvlsMeasured.front().bytes) return kNvlsMeasured.front().share;
  for (std::size_t i = 1; i < kNvlsMeasured.size(); ++i) {
    const Size &low = kNvlsMeasured[i - 1], &high = kNvlsMeasured[i];
    if (bytes > high.bytes) continue;
    const double at = std::log(bytes / low.bytes) / std::log(high.bytes / low.bytes);
    return low.share + at * (high.share - low.share);
  }
  return kNvlsMeasured.back().share;
}

/// A number of ranks on a cluster.
class Job {
 public:
  Job(const GpuCluster& cluster, int ranks)
      : cluster_(cluster),
        ranks_(ranks),
        nodes_((ranks + cluster.gpus_per_node - 1) / cluster.gpus_per_node),
        per_node_((ranks + nodes_ - 1) / nodes_) {
    // Assumes full nodes: a partly filled last node is no faster than the others.
    const double network = cluster.network_GBps;
    bandwidth_ = nodes_ == 1 ? cluster.node_GBps : std::min(cluster.node_GBps, network);
    channels_ = nodes_ == 1 ? cluster.channels : cluster.network_channels;
    steps_ = 2 * (ranks_ - 1);
  }

  AllReduceTime time(double bytes) const {
    AllReduceTime best{std::numeric_limits<double>::infinity(), ""};
    const auto consider = [&](const char* algorithm, int protocol, double us) {
      if (us < best.us)
        best = {us, fmt::format("{}/{}", algorithm, kProtocolNames[static_cast<std::size_t>(protocol)])};
    };
    for (int protocol = 0; protocol < kProtocols; ++protocol) {
      if (protocol == kLL128 && !cluster_.nvlink) continue;
      consider("ring", protocol, ring(bytes, static_cast<std::size_t>(protocol)));
      consider("tree", protocol, tree(bytes, static_cast<std::size_t>(protocol)));
    }
    if (cluster_.nvls_channels > 0 && per_node_ > 1) consider(nodes_ == 1 ? "NVLS" : "NVLSTree", kSimple, nvls(bytes));
    best.us += cluster_.launch_us;
    return best;
  }

 private:
  double cap(const Caps& caps) const {
    return caps[static_cast<std::size_t>(cluster_.generation)][static_cast<std::size_t>(std::min(nodes_, 3) - 1)];
  }
  const HopLatency& intra() const { return cluster_.nvlink ? kNvlink : kPcie; }
  double network_latency(std::size_t protocol) const {
    return cluster_.network_latency_us * (protocol == kSimple ? 2 : 1);
  }

  double ring(double bytes, std::size_t protocol) const {
    double bandwidth = bandwidth_;
    if (protocol == kLL) bandwidth = std::min(cap(kLLMax), bandwidth / 2);
    if (protocol == kLL128) bandwidth = std::min(.92 * bandwidth, channels_ * cap(kRingLL128));
    double hop = intra().ring[protocol];
    if (nodes_ > 1) hop = std::max(hop, protocol == kSimple ? 3.0 : 1.0);
    const double between = nodes_ == 1 ? 0 : 2 * (nodes_ - 1);
    const double across = (per_node_ > 1 ? kNetwork.ring : kNetwork.tree)[protocol] + network_latency(protocol);
    double latency = kRingBase[protocol] + (steps_ - between) * hop + between * across;
    if (nodes_ > 1 && protocol == kSimple && bytes / (channels_ * ranks_) >= 64)
      latency *= cluster_.generation == GpuGeneration::kVolta ? 1.9 : 1.4;
    return latency + bytes / (1e3 * bandwidth * ranks_ / steps_);
  }

  double tree(double bytes, std::size_t protocol) const {
    double bandwidth = std::min(.92 * bandwidth_, channels_ * cap(kTree));
    if (protocol == kLL) bandwidth = std::min(bandwidth / 3.8, cap(kLLMax));
    if (protocol == kLL128)
      bandwidth = std::min(bandwidth * (nodes_ == 1 ? 7.0 / 9 : 120.0 / 128), channels_ * cap(kTreeLL128));
    const double power = bytes >= 64 ? std::floor(std::log2(bytes / 64)) : -1;
    if (power >= 0 && power < 23) bandwidth *= kTreeCorrection[protocol][static_cast<std::size_t>(power)];
    const double latency = kTreeBase[protocol] +
                           2 * ((per_node_ - 1) * intra().tree[protocol] +
                                std::floor(std::log2(nodes_)) * (kNetwork.tree[protocol] + network_latency(protocol)));
    return latency + bytes / (1e3 * bandwidth / 2);
  }

  double nvls(double bytes) const {
    const int channels = cluster_.nvls_channels;
    const double efficiency = cluster_.generation == GpuGeneration::kBlackwell ? .74 : .85;
    double channel = cluster_.nvls_channel_GBps * efficiency * (channels - 1) / channels * 2;
    double latency = kNvlsLatency;
    if (nodes_ > 1) {
      const double between = cluster_.network_GBps / channels * (nodes_ == 2 ? 2 : 1);
      channel = std::min({channel, between, cap(kNvlsTree)});
      latency += 2 * std::floor(std::log2(nodes_)) * (kNvlsTreeNetwork + 2 * cluster_.network_latency_us);
    }
    return (latency + bytes / (1e3 * channels * channel * ranks_ / steps_)) / nvls_share(bytes);
  }

  const GpuCluster& cluster_;
  int ranks_;
  int nodes_;
  int per_node_;
  double bandwidth_;
  int channels_;
  double steps_;
};

}  // namespace

const std::vector<GpuCluster>& gpu_clusters() {
  // node_GBps is the result of nccl-tests if known: 370 on H100, 235 on A100 (nccl-tests issues 212, 119). A network
  // card of 400 Gb/s moves 48 GB/s, of 200 Gb/s 24, of 100 Gb/s 12 (NCCL's search ladder). Clusters of more than two
  // nodes reach nine tenths of this (nccl issue 1221).
  static const std::vector<GpuCluster> clusters = {
      {.name = "h100", .nvls_channels = 8, .nvls_channel_GBps = 40, .network_GBps = .9 * 8 * 48, .price_per_hour = 3},
      {.name = "h100-ethernet",
       .nvls_channels = 8,
       .nvls_channel_GBps = 40,
       .network_channels = 8,
       .network_GBps = .9 * 8 * 12,
       .network_latency_us = 10,
       .price_per_hour = 3},
      {.name = "b200",
       .generation = GpuGeneration::kBlackwell,
       .node_GBps = 700,
       .nvls_channels = 8,
       .nvls_channel_GBps = 90,
       .network_GBps = .9 * 8 * 48,
       .multiprocessors = 148,
       .collective_multiprocessors = 24,
       .price_per_hour = 5},
      {.name = "a100",
       .generation = GpuGeneration::kAmpere,
       .node_GBps = 235,
       .network_GBps = .9 * 8 * 24,
       .multiprocessors = 108,
       .collective_multiprocessors = 24,
       .price_per_hour = 2},
      {.name = "v100",
       .generation = GpuGeneration::kVolta,
       .channels = 12,
       .node_GBps = 120,
       .network_channels = 4,
       .network_GBps = .9 * 4 * 12,
       .launch_us = 8,
       .multiprocessors = 80,
       .collective_multiprocessors = 12,
       .price_per_hour = 1},
      {.name = "pcie",
       .generation = GpuGeneration::kAmpere,
       .nvlink = false,
       .channels = 2,
       .node_GBps = 20,
       .network_channels = 2,
       .network_GBps = .9 * 12,
       .multiprocessors = 84,
       .collective_multiprocessors = 4,
       .price_per_hour = .5},
  };
  return clusters;
}

const GpuCluster& gpu_cluster(std::string_view name) {
  std::string names;
  for (const GpuCluster& cluster : gpu_clusters()) {
    if (cluster.name == name) return cluster;
    names += (names.empty() ? "" : ", ") + cluster.name;
  }
  throw std::invalid_argument(fmt::format("there is no cluster \"{}\": there are {}", name, names));
}

double contention(const GpuCluster& cluster) {
  return static_cast<double>(cluster.multiprocessors) / (cluster.multiprocessors - cluster.collective_multiprocessors);
}

AllReduceModel nccl(const GpuCluster& cluster) {
  return [cluster](double bytes, int ranks) -> AllReduceTime {
    if (ranks <= 1) return {0, "none"};
    if (ranks > cluster.gpus_per_node && cluster.network_GBps <= 0)
      throw std::invalid_argument(
          fmt::format("{} has {} GPUs and no network, not {}", cluster.name, cluster.gpus_per_node, ranks));
    return Job(cluster, ranks).time(bytes);
  };
}

}  // namespace ddpkit::scaling
