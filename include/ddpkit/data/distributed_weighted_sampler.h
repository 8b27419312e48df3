// Tier 2: torch/data/samplers/base.h and, through data_loader.h, torch/data/dataloader/stateless.h.
#pragma once

#include <torch/data/samplers/base.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/data/data_loader.h>

namespace ddpkit {

/// Options of DistributedWeightedSampler.
struct DistributedWeightedSamplerOptions {
  std::uint64_t seed = 0;  ///< The same on every rank.
  /// Samples per epoch, over all ranks, rounded up to a multiple of the world size. Empty: the number of weights.
  std::optional<std::size_t> num_samples = std::nullopt;
};

/// Draws indices with replacement; index i has the probability weights[i] / sum. Works like Python's
/// torch.utils.data.WeightedRandomSampler, but over several ranks. PyTorch has no distributed version.
///
/// All ranks draw the same sequence from seed and epoch. Rank r gets every world_size-th element. All ranks get equally
/// many. The union over the ranks does not depend on the number of ranks, except for the rounding. Copies share their
/// state, so set_epoch() also changes the copy inside a data loader.
class DistributedWeightedSampler : public torch::data::samplers::Sampler<> {
 public:
  /// `weights` need not sum to 1. [index] Throws InvalidArgument if a weight is negative or not finite (the error names
  /// the first), if no weight is positive, or if `rank` does not exist. Not collective.
  DistributedWeightedSampler(std::vector<double> weights, const ProcessGroup& group,
                             const DistributedWeightedSamplerOptions& options = {});
  /// Takes rank and world size instead of a group.
  DistributedWeightedSampler(std::vector<double> weights, int world_size, int rank,
                             const DistributedWeightedSamplerOptions& options = {});

  /// Call before each epoch. Otherwise every epoch draws the same indices.
  void set_epoch(std::uint64_t epoch);
  std::uint64_t epoch() const noexcept;  ///< Set by set_epoch() or load().

  /// Returns the number of samples of this rank per epoch.
  std::size_t num_samples() const noexcept;
  /// Returns this rank's indices of the current epoch, in order; after load(), the remaining indices. A loop that uses
  /// indices() must call set_position(). [sample]
  std::vector<std::size_t> indices() const;

  /// Restarts the epoch, unless load() was called just before. A data loader's begin() calls reset(). A new size must
  /// be the number of weights.
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

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace ddpkit
