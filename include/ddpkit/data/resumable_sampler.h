// Tier 2: torch/data/samplers/base.h.
#pragma once

#include <torch/data/samplers/base.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace ddpkit {

/// The part that DistributedSampler and DistributedWeightedSampler share. In each epoch, all ranks have the same order
/// of indices; rank r gets every world_size-th index. All ranks get equally many. A sampler resumes within an epoch,
/// also on another number of ranks.
///
/// Copies share their state, so set_epoch() also changes the copy inside a data loader.
class ResumableSampler : public torch::data::samplers::Sampler<> {
 public:
  class Impl;  ///< Internal.

  /// Call before each epoch. Otherwise every epoch has the same indices, and rank 0 of a DistributedSampler warns once.
  void set_epoch(std::uint64_t epoch);
  std::uint64_t epoch() const noexcept;  ///< Set by set_epoch() or load().

  /// Returns the number of samples of this rank per epoch.
  std::size_t num_samples() const noexcept;
  /// Returns this rank's indices of the current epoch, in order; after load(), the remaining indices. A loop that uses
  /// indices() must call set_position(). [sample]
  std::vector<std::size_t> indices() const;

  /// Restarts the epoch, unless load() was called just before. A data loader's begin() calls reset(). `new_size`: new
  /// number of samples in the data set; a DistributedWeightedSampler accepts only its number of weights.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  /// Returns up to `batch_size` indices, or an empty optional at the end of the epoch. They count as trained on, unless
  /// set_position() is called in the same epoch.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;
  /// Sets the number of indices() that the model has trained on. torch::data::make_data_loader() and Prefetcher call
  /// set_position() for each batch that they deliver. Empty: unknown. Throws InvalidArgument beyond the end.
  void set_position(std::optional<std::size_t> position);
  /// Saves the epoch and the position over all ranks. Throws InvalidArgument if the position is unknown.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Resumes at the saved position, also on another number of ranks. indices(), next() and the first reset() give the
  /// rest of the epoch, partitioned again. Throws InvalidArgument, and changes nothing, if the epoch of this sampler is
  /// shorter.
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  /// Made by the sampler.
  explicit ResumableSampler(std::shared_ptr<Impl> impl);

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace ddpkit
