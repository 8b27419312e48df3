// Tier 1. Hybrid sharding: several groups of ranks that share a model each.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <ddpkit/comm/process_group.h>

#include "parallel/ddp/shard_output.h"

namespace ddpkit {

struct ReplicaGroups {
  ProcessGroup shards;                                  ///< The ranks that share one copy of the model.
  std::optional<ProcessGroup> replicas = std::nullopt;  ///< The ranks with the same shards. Empty: one copy.
};

/// Shards of gradients that are averaged over the replicas at the end of backward. Before, a rank would wait for
/// another copy's ranks, and these may wait for a rank that waits for this one in a gather.
class ReplicaAverage {
 public:
  void add(std::size_t bucket, at::Tensor shard, std::vector<std::uint8_t> used) {
    parts_.push_back({.bucket = bucket, .shard = std::move(shard), .used = std::move(used)});
  }
  /// Collective. Passes each shard to `output`, in the order of add().
  void finish(const ProcessGroup& replicas, ShardOutput& output) {
    std::vector<Work> works;
    for (const Part& part : parts_) works.push_back(replicas.all_reduce_async(part.shard, ReduceOp::kAvg));
    for (std::size_t i = 0; i < works.size(); ++i) {
      works[i].wait();
      output.receive(parts_[i].bucket, std::move(parts_[i].shard), parts_[i].used);
    }
    parts_.clear();
  }

 private:
  struct Part {
    std::size_t bucket = 0;
    at::Tensor shard;
    std::vector<std::uint8_t> used;
  };
  std::vector<Part> parts_;
};

}  // namespace ddpkit
