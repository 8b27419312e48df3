// Tier 1: ATen/core/Tensor.h, through process_group.h.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstdint>
#include <vector>

#include <ddpkit/comm/process_group.h>

#include "timing.h"

namespace ddpkit::bench {

/// The ranks of a process group, which must outlive it, as who times them together needs them.
class GroupPeers : public Peers {
 public:
  explicit GroupPeers(const ProcessGroup& group) : group_(group) {}
  void barrier() override { group_.barrier(); }
  double from_rank_zero(double value) override {
    const at::Tensor tensor = at::empty({1}, at::kDouble);
    *tensor.data_ptr<double>() = value;
    group_.broadcast(tensor, 0);
    return *tensor.data_ptr<double>();
  }
  void max_over_ranks(std::vector<double>& values) override {
    group_.all_reduce(at::from_blob(values.data(), {static_cast<std::int64_t>(values.size())}, at::kDouble),
                      ReduceOp::kMax);
  }
  std::uint64_t sum_over_ranks(std::uint64_t value) const {
    const at::Tensor tensor = at::empty({1}, at::kLong);
    *tensor.data_ptr<std::int64_t>() = static_cast<std::int64_t>(value);
    group_.all_reduce(tensor);
    return static_cast<std::uint64_t>(*tensor.data_ptr<std::int64_t>());
  }

 private:
  const ProcessGroup& group_;
};

}  // namespace ddpkit::bench
