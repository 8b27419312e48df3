// Tier 1: ATen/core/Tensor.h, through process_group.h. Torch's archives are declared, not included.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/data/epoch_position.h>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace ddpkit {

/// Options of LengthBucketedSampler.
struct LengthBucketedSamplerOptions {
  std::size_t batch_size = 32;  ///< Samples a step, of all ranks together; at least one a rank.
  bool shuffle = true;          ///< Otherwise batches come from the shortest samples to the longest, in every epoch.
  std::uint64_t seed = 0;       ///< The same on every rank.
  bool drop_last = false;  ///< Leave the smaller batch out that remains where batch_size does not divide the samples.
  /// So many batches' worth of shuffled samples are sorted by length together. More: batches of more even lengths;
  /// fewer: samples that meet more others over the epochs.
  std::size_t batches_per_bucket = 32;
};

/// A rank's share of one batch.
struct LengthBucketedBatch {
  std::vector<std::size_t> indices;  ///< From the longest sample to the shortest.
  /// The last so many of `indices` are padding that other ranks hold as well: give them no weight.
  std::size_t repeated = 0;
  std::size_t batch_size = 0;  ///< Samples of the whole batch, over all ranks, without padding.
};

/// How even an epoch is.
struct LengthBalance {
  /// The sum over batches of the fullest rank's length, over that of the ranks' mean: 1 is even, 1.05 means that ranks
  /// wait for 5 % of the time.
  double fullest_over_mean = 1;
  double padding =
      0;  ///< Share of all lengths that is padding where each rank pads its samples to its longest: 0 .. 1.
};

/// Deals samples of different lengths out to the ranks in batches of similar lengths. In an epoch every sample belongs
/// to one batch and, within it, to one rank; ranks' shares of a batch differ by at most one sample and are as equal in
/// total length as a greedy deal makes them (longest first, each to the rank that has least: Graham 1969). All ranks
/// take the same number of steps, and which samples meet in a batch depends on seed and epoch alone, not on the number
/// of ranks.
///
/// Padding is rarer than DistributedSampler's: only a batch with fewer samples than ranks (the last one) is filled up
/// by repeating its own samples, and says so. Not collective: every rank computes the same from the same lengths.
class LengthBucketedSampler {
 public:
  /// `lengths` [sample], each at least 0, in any unit. Throws InvalidArgument for a batch_size below the number of
  /// ranks, no samples, or (with drop_last) fewer than one batch.
  LengthBucketedSampler(std::vector<std::int64_t> lengths, const ProcessGroup& group,
                        const LengthBucketedSamplerOptions& options = {});
  /// The same without a group, for rank `rank` of `world_size`.
  LengthBucketedSampler(std::vector<std::int64_t> lengths, int world_size, int rank,
                        const LengthBucketedSamplerOptions& options = {});

  /// Begins that epoch at its first batch; after load(), once, at the next batch if it is the loaded epoch.
  void set_epoch(std::uint64_t epoch);
  std::uint64_t epoch() const noexcept { return epoch_; }  ///< As set_epoch() or load() said.

  std::size_t num_batches() const noexcept { return batches_.size(); }  ///< Of every epoch.
  /// This rank's share of the current epoch, from its first batch. A loop that trains on them calls set_position().
  /// [batch]
  const std::vector<LengthBucketedBatch>& batches() const noexcept {
    position_.hand_out();
    return batches_;
  }
  LengthBalance balance() const noexcept { return balance_; }  ///< Of the current epoch, over all ranks.

  /// The next batch; empty at the end of the epoch. It counts as trained on, unless set_position() is called in the
  /// same epoch.
  std::optional<LengthBucketedBatch> next();
  std::size_t position() const noexcept { return position_.last(); }  ///< Batches of this epoch that are trained on.
  /// The model has trained on the first `position` of batches(). Throws InvalidArgument beyond the end.
  void set_position(std::size_t position);

  /// Saves the epoch and the position. A loaded sampler resumes with the next batch, also on another number of ranks.
  /// Throws InvalidArgument if the position is unknown: batches() was called and set_position() was not, or next() was
  /// called on another thread.
  void save(torch::serialize::OutputArchive& archive) const;
  /// Throws InvalidArgument, and changes nothing, if the epoch of this sampler has fewer batches.
  void load(torch::serialize::InputArchive& archive);

 private:
  void draw();

  std::vector<std::int64_t> lengths_;
  std::size_t world_size_;
  std::size_t rank_;
  LengthBucketedSamplerOptions options_;
  std::uint64_t epoch_ = 0;
  bool was_loaded_ = false;
  EpochPosition position_;
  std::vector<LengthBucketedBatch> batches_;
  LengthBalance balance_;
};

}  // namespace ddpkit
