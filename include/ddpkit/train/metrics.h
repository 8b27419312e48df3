// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ddpkit/comm/process_group.h>

namespace ddpkit::train {

/// Indices begin .. end-1.
struct IndexRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t size() const noexcept { return end - begin; }
};

/// Rank `rank`'s share of 0 .. size-1 for evaluation: every index belongs to exactly one rank, so that nothing is
/// counted twice. Shares differ by at most one; with fewer indices than ranks some are empty.
IndexRange evaluation_share(std::int64_t size, int rank, int world_size);

/// Sums each value over the ranks, in one all-reduce of doubles: exact for counts up to 2^53, the same bits on every
/// rank. Collective: all ranks pass equally many values.
std::vector<double> sum_over_ranks(const std::vector<double>& values, const ProcessGroup& group);

/// How a classifier did.
struct ClassificationResult {
  double loss = 0;           ///< Mean over all samples of all ranks; NaN without samples.
  double accuracy = 0;       ///< Share of samples whose highest logit is the target's: 0 .. 1; NaN without samples.
  std::int64_t samples = 0;  ///< Of all ranks.
};

/// Sums up a classifier's batches on their device, without waiting for it, until reduce().
class ClassificationMetrics {
 public:
  explicit ClassificationMetrics(at::Device device);

  /// `logits` [batch, classes], `targets` [batch] int64, `mean_loss` a scalar: the batch's mean loss.
  void add(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& mean_loss);

  /// Everything added so far on all ranks; the same bits on each. Collective, one all-reduce.
  ClassificationResult reduce(const ProcessGroup& group) const;

 private:
  at::Tensor sums_;  // Loss, correct, count: [3] float64.
};

}  // namespace ddpkit::train
