// Tier 1: ATen/core/Tensor.h, through process_group.h.
#pragma once

#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/item.h>

#include <cstdint>
#include <vector>

#include <ddpkit/comm/process_group.h>

#include "step_clock.h"
#include "timing.h"

namespace ddpkit::bench {

/// The ranks of a process group, for median_us(). The process group must outlive this object.
class GroupPeers : public Peers {
 public:
  explicit GroupPeers(const ProcessGroup& group) : group_(group) {}
  void barrier() override { group_.barrier(); }
  void finish() override { wait_for(group_.device()); }
  double from_rank_zero(double value) override {
    const at::Tensor tensor = at::full({1}, value, at::device(group_.device()).dtype(at::kDouble));
    group_.broadcast(tensor, 0);
    return tensor.item<double>();
  }
  void max_over_ranks(std::vector<double>& values) override {
    const at::Tensor mine = at::from_blob(values.data(), {static_cast<std::int64_t>(values.size())}, at::kDouble);
    const at::Tensor there = mine.to(group_.device());
    group_.all_reduce(there, ReduceOp::kMax);
    mine.copy_(there);
  }
  std::uint64_t sum_over_ranks(std::uint64_t value) const {
    const at::Tensor tensor =
        at::full({1}, static_cast<std::int64_t>(value), at::device(group_.device()).dtype(at::kLong));
    group_.all_reduce(tensor);
    return static_cast<std::uint64_t>(tensor.item<std::int64_t>());
  }

 private:
  const ProcessGroup& group_;
};

}  // namespace ddpkit::bench
