// Tier 2: torch/data/samplers/base.h and, through data_loader.h, torch/data/dataloader/stateless.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/data/data_loader.h>
#include <ddpkit/data/resumable_sampler.h>

namespace ddpkit {

/// Options of DistributedWeightedSampler.
struct DistributedWeightedSamplerOptions {
  std::uint64_t seed = 0;  ///< The same on every rank.
  /// Samples per epoch, over all ranks, rounded up to a multiple of the world size. Empty: the number of weights.
  std::optional<std::size_t> num_samples = std::nullopt;
};

/// Draws indices with replacement; index i has the probability weights[i] / sum. Works like Python's
/// torch.utils.data.WeightedRandomSampler, but over several ranks. PyTorch has no distributed version. All ranks draw
/// the same sequence from seed and epoch. The union over the ranks does not depend on the number of ranks, except for
/// the rounding.
class DistributedWeightedSampler : public ResumableSampler {
 public:
  /// `weights` need not sum to 1. [index] Throws InvalidArgument if a weight is negative or not finite (the error names
  /// the first), if no weight is positive, or if `rank` does not exist. Not collective.
  DistributedWeightedSampler(std::vector<double> weights, const ProcessGroup& group,
                             const DistributedWeightedSamplerOptions& options = {});
  /// Takes rank and world size instead of a group.
  DistributedWeightedSampler(std::vector<double> weights, int world_size, int rank,
                             const DistributedWeightedSamplerOptions& options = {});
};

}  // namespace ddpkit
