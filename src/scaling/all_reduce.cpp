#include <ddpkit/scaling/all_reduce.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

namespace ddpkit::scaling {
namespace {

/// 1 GB/s is 1,000 bytes per microsecond.
double us_of(double bytes, double GBps) { return GBps > 0 ? bytes / (1e3 * GBps) : 0; }

double levels(int ranks) { return std::ceil(std::log2(ranks)); }

/// The share of a buffer that belongs to other ranks.
double others(int ranks) { return static_cast<double>(ranks - 1) / ranks; }

template <class Formula>
AllReduceModel model(std::string algorithm, Formula formula) {
  return [algorithm = std::move(algorithm), formula](double bytes, int ranks) -> AllReduceTime {
    if (ranks <= 1) return {0, "none"};
    return {formula(bytes, ranks), algorithm};
  };
}

}  // namespace

AllReduceModel ring(const AlphaBeta& link) {
  return model("ring", [link](double bytes, int ranks) {
    return 2 * (ranks - 1) * link.alpha_us + 2 * others(ranks) * us_of(bytes, link.bandwidth_GBps) +
           others(ranks) * us_of(bytes, link.reduce_GBps);
  });
}

AllReduceModel halving_doubling(const AlphaBeta& link) {
  return model("halving-doubling", [link](double bytes, int ranks) {
    return 2 * levels(ranks) * link.alpha_us + 2 * others(ranks) * us_of(bytes, link.bandwidth_GBps) +
           others(ranks) * us_of(bytes, link.reduce_GBps);
  });
}

AllReduceModel double_tree(const AlphaBeta& link) {
  return model("tree", [link](double bytes, int ranks) {
    return 2 * levels(ranks) * link.alpha_us + 2 * us_of(bytes, link.bandwidth_GBps) + us_of(bytes, link.reduce_GBps);
  });
}

AllReduceModel in_switch(const AlphaBeta& link) {
  return model("switch", [link](double bytes, int) { return link.alpha_us + us_of(bytes, link.bandwidth_GBps); });
}

AllReduceModel fastest(std::vector<AllReduceModel> models) {
  if (models.empty()) throw std::invalid_argument("fastest() of no model");
  return [models = std::move(models)](double bytes, int ranks) {
    AllReduceTime best{std::numeric_limits<double>::infinity(), ""};
    for (const AllReduceModel& model : models) {
      if (AllReduceTime time = model(bytes, ranks); time.us < best.us) best = std::move(time);
    }
    return best;
  };
}

AllReduceModel shared_memory(const SharedMemory& memory) {
  return model("shm", [memory](double bytes, int ranks) {
    const double GBps = std::min(memory.rank_GBps, memory.host_GBps / ranks);
    return 2 * memory.barrier_us + us_of(2 * bytes, GBps);
  });
}

AllReduceModel hierarchical(AllReduceModel inside, AllReduceModel between, int ranks_per_host) {
  if (ranks_per_host < 1) throw std::invalid_argument(fmt::format("{} ranks on a host", ranks_per_host));
  return [=](double bytes, int ranks) -> AllReduceTime {
    if (ranks <= ranks_per_host) return inside(bytes, ranks);
    const int hosts = (ranks + ranks_per_host - 1) / ranks_per_host;
    const AllReduceTime here = inside(bytes, ranks_per_host), there = between(bytes, hosts);
    return {here.us + there.us, here.algorithm + " + " + there.algorithm};
  };
}

AllReduceModel measured(std::vector<AllReducePoint> points, int ranks) {
  if (points.empty()) throw std::invalid_argument("there are no measured all-reduces");
  for (const AllReducePoint& point : points) {
    if (!(point.bytes > 0) || !(point.us > 0))
      throw std::invalid_argument(fmt::format("an all-reduce of {} bytes in {} us", point.bytes, point.us));
  }
  std::sort(points.begin(), points.end(), [](const auto& a, const auto& b) { return a.bytes < b.bytes; });
  return [points = std::move(points), ranks](double bytes, int asked) -> AllReduceTime {
    if (asked <= 1) return {0, "none"};
    if (asked != ranks)
      throw std::invalid_argument(fmt::format("all-reduce was measured on {} ranks, not on {}", ranks, asked));
    const auto next = std::find_if(points.begin(), points.end(), [&](const auto& p) { return p.bytes >= bytes; });
    if (next == points.begin()) return {next->us, "measured"};
    if (next == points.end()) return {points.back().us * bytes / points.back().bytes, "measured"};
    const AllReducePoint& last = *std::prev(next);
    const double share = (bytes - last.bytes) / (next->bytes - last.bytes);
    return {last.us + share * (next->us - last.us), "measured"};
  };
}

double bus_GBps(double bytes, double us, int ranks) { return bytes / us / 1e3 * 2 * others(ranks); }

}  // namespace ddpkit::scaling
