// Tier 2: torch/data/samplers/base.h.
#pragma once

#include <torch/data/samplers/base.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ddpkit/comm/process_group.h>

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

  /// Call before each epoch, or every epoch sees the same order, of which rank 0 warns once. Takes effect at the next
  /// reset().
  void set_epoch(std::uint64_t epoch);
  std::uint64_t epoch() const noexcept;  ///< As set_epoch() or load() said.

  /// Samples this rank sees in an epoch.
  std::size_t num_samples() const noexcept;
  /// This rank's indices for the current epoch, in order; after load() those that are left. [sample]
  std::vector<std::size_t> indices() const;

  /// Starts the epoch over (a data loader's begin() calls it), unless it was just loaded. A new size keeps everything
  /// else.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  /// Up to `batch_size` indices; empty optional at the end.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;
  /// For who takes indices() ahead, in other threads: `position` of them have been used. Throws InvalidArgument beyond
  /// the end.
  void set_position(std::size_t position);
  /// Epoch, and how much of it all ranks have taken.
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
