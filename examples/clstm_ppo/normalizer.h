// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include <ddpkit/comm/process_group.h>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace clstm_ppo {

/// Normalises each number of a state to mean 0 and standard deviation 1, over the states of all ranks so far. The
/// statistics are bitwise equal on all ranks: T. Chan, G. Golub and R. LeVeque, "Updating Formulae and a Pairwise
/// Algorithm for Computing Sample Variances", 1979, on sums reduced over the ranks.
class RunningNormalizer {
 public:
  explicit RunningNormalizer(std::int64_t size);

  /// Adds the `states` [..., size] of all ranks. Collective.
  void update(const at::Tensor& states, const ddpkit::ProcessGroup& group);

  /// Returns (states - mean) / deviation, clamped to -10 .. 10, on the states' device. Returns the states unchanged
  /// before the first update.
  at::Tensor operator()(const at::Tensor& states) const;

  double count() const noexcept { return count_; }                   ///< States of all ranks so far.
  const at::Tensor& mean() const noexcept { return mean_; }          ///< [size] float64, on the CPU.
  const at::Tensor& variance() const noexcept { return variance_; }  ///< [size] float64, on the CPU.

  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  double count_ = 0;
  at::Tensor mean_, variance_;
};

}  // namespace clstm_ppo
