// Tier 1: ATen/core/Tensor.h, through process_group.h. Torch's archives are only declared.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ddpkit/comm/process_group.h>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace ddpkit {

/// Options of LengthBucketedSampler.
struct LengthBucketedSamplerOptions {
  std::size_t batch_size = 32;  ///< Samples per step, over all ranks. At least one per rank.
  bool shuffle = true;          ///< False: batches are ordered from the shortest samples to the longest.
  std::uint64_t seed = 0;       ///< The same on every rank.
  bool drop_last = false;       ///< Drop the last batch if it has fewer than batch_size samples.
  /// Number of batches whose shuffled samples are sorted by length together. A larger number gives batches of more
  /// equal lengths. A smaller number mixes the samples more over the epochs.
  std::size_t batches_per_bucket = 32;
};

/// The part of a batch that one rank trains on.
struct LengthBucketedBatch {
  std::vector<std::size_t> indices;  ///< From the longest sample to the shortest.
  /// The last `repeated` of `indices` are padding: other ranks have the same samples. Give them weight 0.
  std::size_t repeated = 0;
  std::size_t batch_size = 0;  ///< Samples of the whole batch over all ranks, without padding.
};

/// Balance of an epoch between ranks.
struct LengthBalance {
  /// Sum over batches of the largest total length of a rank, divided by the sum of the mean. 1: balanced. 1.05: ranks
  /// wait for 5 % of the time.
  double fullest_over_mean = 1;
  /// Fraction of all lengths that is padding if each rank pads its samples to its longest: 0 .. 1.
  double padding = 0;
};

/// Partitions samples of different lengths into batches of similar lengths, and each batch over the ranks. In an epoch
/// every sample belongs to one batch and to one rank. The parts of a batch differ by at most one sample. Their total
/// lengths are as equal as the greedy algorithm makes them: longest sample first, each to the rank with the smallest
/// total (Graham 1969). All ranks take the same number of steps. The batches depend on seed and epoch, and not on the
/// number of ranks.
///
/// Only a batch with fewer samples than ranks (the last one) is padded, by repeating its samples; see
/// LengthBucketedBatch::repeated. Not collective: every rank computes the same result from the same lengths. Copies
/// share their state.
class LengthBucketedSampler {
 public:
  class Impl;  ///< Internal.

  /// `lengths` [sample], each at least 0, in any unit. Throws InvalidArgument if batch_size is less than the number of
  /// ranks, if there are no samples, or, with drop_last, if there is less than one batch.
  LengthBucketedSampler(std::vector<std::int64_t> lengths, const ProcessGroup& group,
                        const LengthBucketedSamplerOptions& options = {});
  /// Takes rank and world size instead of a group.
  LengthBucketedSampler(std::vector<std::int64_t> lengths, int world_size, int rank,
                        const LengthBucketedSamplerOptions& options = {});

  /// Starts the epoch at its first batch. The first call after load(), if for the loaded epoch, keeps the loaded
  /// position.
  void set_epoch(std::uint64_t epoch);
  std::uint64_t epoch() const noexcept;  ///< Set by set_epoch() or load().

  std::size_t num_batches() const noexcept;  ///< Per epoch.
  /// Returns this rank's part of the current epoch, from its first batch. A loop that uses batches() must call
  /// set_position(). [batch]
  const std::vector<LengthBucketedBatch>& batches() const noexcept;
  LengthBalance balance() const noexcept;  ///< Of the current epoch, over all ranks.

  /// Returns the next batch, or an empty optional at the end of the epoch. The batch counts as trained on, unless
  /// set_position() is called in the same epoch.
  std::optional<LengthBucketedBatch> next();
  std::size_t position() const noexcept;  ///< Batches of this epoch that are trained on.
  /// Sets the number of batches() that the model has trained on. Throws InvalidArgument beyond the end.
  void set_position(std::size_t position);

  /// Saves the epoch and the position. A loaded sampler resumes with the next batch, also on another number of ranks.
  /// Throws InvalidArgument if the position is unknown: batches() was called without set_position(), or another thread
  /// called next().
  void save(torch::serialize::OutputArchive& archive) const;
  /// Throws InvalidArgument, and changes nothing, if the epoch of this sampler has fewer batches.
  void load(torch::serialize::InputArchive& archive);

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace ddpkit
