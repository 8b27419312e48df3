#include "links.h"

#include <fstream>
#include <map>
#include <stdexcept>
#include <thread>

#include <fmt/format.h>

#include <ddpkit/error.h>
#include <ddpkit/scaling/nccl.h>

#include "bench/row.h"

namespace ddpkit::cli {
namespace {

/// Reads the all-reduces of the file's first backend (shm before others), for its largest number of ranks.
LinkModel read_collectives(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw InvalidArgument(fmt::format("{}: cannot be read", path));
  std::map<int, std::vector<scaling::AllReducePoint>> points;
  std::string line;
  std::getline(file, line);
  if (line != bench::kCsvHeader)
    throw InvalidArgument(fmt::format("{}:1: is no table of ddpkit bench collectives: its first line must be {}", path,
                                      bench::kCsvHeader));
  for (int number = 2; std::getline(file, line); ++number) {
    const auto row = bench::parse_report(line + ",0");
    if (!row) throw InvalidArgument(fmt::format("{}:{}: is no row of ddpkit bench collectives", path, number));
    if (row->collective == "all_reduce" && row->backend == "shm" && row->memory == "symmetric" && row->bytes > 0)
      points[row->ranks].push_back({static_cast<double>(row->bytes), row->us});
  }
  if (points.empty()) throw InvalidArgument(fmt::format("{}: holds no all_reduce of shm in symmetric memory", path));
  const auto& [ranks, measured] = *points.rbegin();
  return {.all_reduce = scaling::measured(measured, ranks),
          .name = fmt::format("{} ranks on shared memory, measured in {}", ranks, path),
          .overlap = false,
          .most_devices = ranks,
          .any_number = false};
}

}  // namespace

LinkModel make_links(const Links& links) try {
  if (!links.collectives.empty()) return read_collectives(links.collectives);
  if (links.bandwidth_GBps > 0) {
    const scaling::AlphaBeta link{.alpha_us = links.alpha_us < 0 ? 5 : links.alpha_us,
                                  .bandwidth_GBps = links.bandwidth_GBps};
    return {.all_reduce =
                scaling::fastest({scaling::ring(link), scaling::halving_doubling(link), scaling::double_tree(link)}),
            .name = fmt::format("links of {} us and {} GB/s", link.alpha_us, link.bandwidth_GBps)};
  }
  if (links.cluster == "shm") {
    const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
    return {.all_reduce = scaling::shared_memory({}),
            .name = fmt::format("CPU ranks on shared memory, {} cores, as assumed (measure: ddpkit bench collectives "
                                "--csv FILE)",
                                cores),
            .overlap = false,
            .most_devices = cores};
  }
  const scaling::GpuCluster& cluster = scaling::gpu_cluster(links.cluster);
  return {.all_reduce = scaling::nccl(cluster),
          .name = fmt::format("NCCL on {}, {} GPUs a node", cluster.name, cluster.gpus_per_node),
          .contention = scaling::contention(cluster),
          .price_per_hour = cluster.price_per_hour};
} catch (const std::invalid_argument& error) {
  throw InvalidArgument(error.what());
}

}  // namespace ddpkit::cli
