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

/// Names and defaults are those of Python's torch.utils.data.DistributedSampler.
struct DistributedSamplerOptions {
  bool shuffle = true;     ///< Another order in each epoch, the same on all ranks. False: the order of the data set.
  std::uint64_t seed = 0;  ///< The same on every rank.
  /// Drop the tail so that the samples divide evenly over the ranks. False: repeat samples from the front.
  bool drop_last = false;
};

/// Partitions the indices 0 .. size-1: rank r gets every world_size-th index. All ranks get equally many. Yields the
/// same indices as Python's torch.utils.data.DistributedSampler for the same arguments.
///
/// Copies share their state, so set_epoch() also changes the copy inside a data loader.
class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  /// `size`: number of samples in the data set. Throws InvalidArgument if there are too few samples for one per rank.
  /// Not collective.
  DistributedSampler(std::size_t size, const ProcessGroup& group, const DistributedSamplerOptions& options = {});
  /// Takes rank and world size instead of a group.
  DistributedSampler(std::size_t size, int world_size, int rank, const DistributedSamplerOptions& options = {});

  /// Call before each epoch. Otherwise every epoch has the same order, and rank 0 warns once.
  void set_epoch(std::uint64_t epoch);
  std::uint64_t epoch() const noexcept;  ///< Set by set_epoch() or load().

  /// Returns the number of samples of this rank per epoch.
  std::size_t num_samples() const noexcept;
  /// Returns this rank's indices of the current epoch, in order; after load(), the remaining indices. A loop that uses
  /// indices() must call set_position(). [sample]
  std::vector<std::size_t> indices() const;

  /// Restarts the epoch, unless load() was called just before. A data loader's begin() calls reset(). A new size keeps
  /// all other settings.
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
