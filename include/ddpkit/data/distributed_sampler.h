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

/// Names and defaults of Python's torch.utils.data.DistributedSampler.
struct DistributedSamplerOptions {
  bool shuffle = true;     ///< Another order in each epoch, the same on all ranks; otherwise that of the data set.
  std::uint64_t seed = 0;  ///< The same on every rank.
  /// Drop the tail so that the samples divide evenly over ranks; otherwise repeat samples from the front.
  bool drop_last = false;
};

/// Deals the indices 0 .. size-1 out to the ranks: rank r takes every world_size-th, all ranks equally many. Yields the
/// very indices that Python's torch.utils.data.DistributedSampler yields for the same arguments.
///
/// A handle: copies share their state, so set_epoch() reaches the copy inside a data loader.
class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  /// `size` samples in the dataset. Throws InvalidArgument when the ranks cannot each get one.
  DistributedSampler(std::size_t size, const ProcessGroup& group, const DistributedSamplerOptions& options = {});
  /// The same without a group, for rank `rank` of `world_size`.
  DistributedSampler(std::size_t size, int world_size, int rank, const DistributedSamplerOptions& options = {});

  /// Call before each epoch, or every epoch sees the same order, of which rank 0 warns once.
  void set_epoch(std::uint64_t epoch);
  std::uint64_t epoch() const noexcept;  ///< As set_epoch() or load() said.

  /// Samples this rank sees in an epoch.
  std::size_t num_samples() const noexcept;
  /// This rank's indices for the current epoch, in order; after load() those that are left. A loop that trains on
  /// them calls set_position(). [sample]
  std::vector<std::size_t> indices() const;

  /// Starts the epoch over (a data loader's begin() calls it), unless it was just loaded. A new size keeps everything
  /// else.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  /// Up to `batch_size` indices; empty optional at the end. They count as trained on, unless set_position() is called
  /// in the same epoch.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;
  /// The model has trained on the first `position` of indices(). torch::data::make_data_loader() and Prefetcher call
  /// it for each batch that they deliver. Empty: unknown. Throws InvalidArgument beyond the end.
  void set_position(std::optional<std::size_t> position);
  /// Epoch, and how much of it the models of all ranks have trained on. Throws InvalidArgument where that is unknown.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// The very next sample comes next, also on another number of ranks: indices(), next() and the first reset() give
  /// what is left of the epoch, dealt out anew. Throws InvalidArgument, and changes nothing, where the epoch is shorter
  /// here.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace ddpkit
