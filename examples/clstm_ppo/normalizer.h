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

/// Brings each number of a state to mean 0 and deviation 1, by all states that all ranks have seen so far. The
/// statistics are the same on every rank, to the bit: T. Chan, G. Golub and R. LeVeque, "Updating Formulae and a
/// Pairwise Algorithm for Computing Sample Variances", 1979, on sums that are reduced over the ranks.
class RunningNormalizer {
 public:
  explicit RunningNormalizer(std::int64_t size);

  /// Takes in this rank's `states` [..., size] and the other ranks'. Collective.
  void update(const at::Tensor& states, const ddpkit::ProcessGroup& group);

  /// (states - mean) / deviation, within -10 .. 10, on the states' device. As they are before the first update.
  at::Tensor operator()(const at::Tensor& states) const;

  double count() const noexcept { return count_; }                   ///< States seen, of all ranks.
  const at::Tensor& mean() const noexcept { return mean_; }          ///< [size] float64, on the CPU.
  const at::Tensor& variance() const noexcept { return variance_; }  ///< The same.

  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  double count_ = 0;
  at::Tensor mean_, variance_;
};

}  // namespace clstm_ppo
