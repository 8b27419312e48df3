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

/// Names and defaults are those of Python's PowerSGDState.
struct PowerSGDOptions {
  /// Rank of the two factors that approximate a gradient. A higher rank sends more and is more accurate. Usually 1 to
  /// 4.
  std::int64_t matrix_approximation_rank = 1;
  /// Number of backwards with a full all-reduce before compression starts. Training is most sensitive at the start: use
  /// about a tenth of all steps, and at least the warm-up. May be 0 or 1, unlike in Python: state is kept per
  /// parameter.
  std::uint64_t start_powerSGD_iter = 1000;
  /// A gradient of n x m is compressed if (n + m) * rank * min_compression_rate < n * m.
  double min_compression_rate = 2;
  /// Add the compression error of a gradient to the next gradient. Needs memory of the gradients' size.
  bool use_error_feedback = true;
  /// Start from the factor of the previous step. False: start from a random factor.
  bool warm_start = true;
  /// Added to the norms by which columns are divided.
  double orthogonalization_epsilon = 0;
  std::uint32_t random_seed = 0;  ///< The same on all ranks.
  /// Compress gradients of the same shape in one bucket by one batched product.
  bool batch_tensors_with_same_shape = false;
};

/// Elements that a rank has passed to all-reduce since the first compressed backward.
struct PowerSGDStats {
  std::uint64_t numel_before_compression = 0;  ///< Elements of the gradients.
  std::uint64_t numel_after_compression = 0;   ///< Elements sent.
  /// Returns numel_before_compression / numel_after_compression; 0 before the first compression.
  double compress_rate() const;
};

/// Sends two thin factors instead of each gradient matrix, like Python's powerSGD_hook. After T. Vogels, S. P.
/// Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
/// 2019. The gradient as a matrix M (first dimension by the rest) becomes P Q^T with P = orthogonalize(mean of M Q) and
/// Q = mean of M^T P. These are two small all-reduces; the second runs while the end of backward waits. Gradients that
/// are too small to compress (mainly biases) and complex gradients are all-reduced in full.
///
///     ddpkit::comm_hooks::PowerSGD power_sgd(ddp.group(), {.matrix_approximation_rank = 2});
///     ddp.register_comm_hook(power_sgd);
///
/// Copies share their state, so the caller's copy can save the state of the registered one. Each rank multiplies the
/// factors, so gradients are bit-identical between ranks if their processors are the same.
class PowerSGD {
 public:
  /// Throws InvalidArgument for a rank below 1, and for a negative rate or epsilon.
  explicit PowerSGD(ProcessGroup group, const PowerSGDOptions& options = {});

  /// The communication hook. Collective.
  BucketReduction operator()(GradBucket& bucket);

  const PowerSGDOptions& options() const noexcept;  ///< The options passed to the constructor.
  /// Returns the number of backwards so far.
  std::uint64_t iterations() const noexcept;
  PowerSGDStats stats() const noexcept;  ///< So far, on this rank.

  /// Saves the state that is needed to resume, without the options. The errors differ between ranks, so each rank saves
  /// and loads a separate file. Must not be called within backward.
  void save(torch::serialize::OutputArchive& archive) const;
  /// Loads the state. Must not be called within backward. Throws InvalidArgument for the state of another rank or
  /// another world size.
  void load(torch::serialize::InputArchive& archive);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace ddpkit::comm_hooks
