// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <cstdint>
#include <memory>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/parallel/comm_hooks.h>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace ddpkit::comm_hooks {

/// Names and defaults of Python's PowerSGDState.
struct PowerSGDOptions {
  /// Of the two factors that stand for a gradient: larger sends more and is nearer. Usually 1 to 4.
  std::int64_t matrix_approximation_rank = 1;
  /// So many backwards are all-reduced in full first, since training is most sensitive at its start: about a tenth of
  /// all steps, and no less than the warm-up. Unlike in Python it may be 0 or 1, for state is kept by parameter.
  std::uint64_t start_powerSGD_iter = 1000;
  /// A gradient of n x m is compressed where (n + m) * rank * min_compression_rate < n * m.
  double min_compression_rate = 2;
  /// What compression leaves out of a gradient is added to the next one. Takes memory of the gradients' size.
  bool use_error_feedback = true;
  /// Start from the factor of the step before rather than from a random one.
  bool warm_start = true;
  /// Added to the norms that columns are divided by.
  double orthogonalization_epsilon = 0;
  std::uint32_t random_seed = 0;  ///< The same on all ranks.
  /// Compress gradients of one shape that share a bucket by one batched product.
  bool batch_tensors_with_same_shape = false;
};

/// What compression has saved, in elements that a rank has handed to all-reduce since the first compressed backward.
struct PowerSGDStats {
  std::uint64_t numel_before_compression = 0;  ///< Of the gradients.
  std::uint64_t numel_after_compression = 0;   ///< Sent for them.
  /// Of the two; 0 before the first.
  double compress_rate() const;
};

/// Sends two thin factors in place of each gradient matrix: T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD:
/// Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019, as Python's powerSGD_hook does.
/// Seen as a matrix M (first dimension by the rest), the gradient becomes P Q^T with P = orthogonalize(mean of M Q) and
/// Q = mean of M^T P: two small all-reduces, the second while the end of backward waits. What does not pay to compress,
/// biases above all, and complex gradients are all-reduced in full.
///
///     ddpkit::comm_hooks::PowerSGD power_sgd(ddp.group(), {.matrix_approximation_rank = 2});
///     ddp.register_comm_hook(power_sgd);
///
/// A handle: copies share their state, so that the caller's can save what the registered one has learned. The ranks'
/// gradients are the same to the bit where their processors are the same, since each multiplies the factors out itself.
class PowerSGD {
 public:
  /// Throws InvalidArgument for a rank below 1, or a negative rate or epsilon.
  explicit PowerSGD(ProcessGroup group, const PowerSGDOptions& options = {});

  /// The hook. Collective.
  PendingReduction operator()(GradBucket& bucket);

  const PowerSGDOptions& options() const noexcept;
  /// Backwards so far.
  std::uint64_t iterations() const noexcept;
  PowerSGDStats stats() const noexcept;  ///< So far, of this rank.

  /// Everything that a resumed training needs to go on as if it had not been stopped, options apart. Errors differ from
  /// rank to rank: each rank saves and loads its own file. Not within backward. load() throws InvalidArgument for
  /// another rank's state, or one of another world size.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace ddpkit::comm_hooks
