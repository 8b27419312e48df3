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
  /// Samples of all ranks in an epoch, rounded up so that they divide evenly; empty: as many as there are weights.
  std::optional<std::size_t> num_samples = std::nullopt;
};

/// Draws indices with replacement, index i with the probability weights[i] / sum: what Python's
/// torch.utils.data.WeightedRandomSampler is, over several ranks, which Python lacks.
///
/// All ranks draw the same sequence, from seed and epoch alone, and rank r takes every world_size-th of it: the places
/// are disjoint, all ranks get equally many, and the union over the ranks does not depend on their number (up to the
/// rounding). A handle: copies share their state, so set_epoch() reaches the copy inside a data loader.
class DistributedWeightedSampler : public torch::data::samplers::Sampler<> {
 public:
  /// `weights` need not sum to 1. [index] Throws InvalidArgument when one is negative or not finite, or none is
  /// positive, naming the first, and where there is no such rank.
  DistributedWeightedSampler(std::vector<double> weights, const ProcessGroup& group,
                             const DistributedWeightedSamplerOptions& options = {});
  /// The same without a group, for rank `rank` of `world_size`.
  DistributedWeightedSampler(std::vector<double> weights, int world_size, int rank,
                             const DistributedWeightedSamplerOptions& options = {});

  /// Call before each epoch, or every epoch draws the same.
  void set_epoch(std::uint64_t epoch);
  std::uint64_t epoch() const noexcept;  ///< As set_epoch() or load() said.

  /// Samples this rank sees in an epoch.
  std::size_t num_samples() const noexcept;
  /// This rank's indices for the current epoch, in order; after load() those that are left. A loop that trains on
  /// them calls set_position(). [sample]
  std::vector<std::size_t> indices() const;

  /// Starts the epoch over (a data loader's begin() calls it), unless it was just loaded. A new size must be the number
  /// of weights.
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
