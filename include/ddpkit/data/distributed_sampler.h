// Tier 2: torch/data/samplers/base.h and, through data_loader.h, torch/data/dataloader/stateless.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/data/data_loader.h>
#include <ddpkit/data/resumable_sampler.h>

namespace ddpkit {

/// Names and defaults are those of Python's torch.utils.data.DistributedSampler.
struct DistributedSamplerOptions {
  bool shuffle = true;     ///< Another order in each epoch, the same on all ranks. False: the order of the data set.
  std::uint64_t seed = 0;  ///< The same on every rank.
  /// Drop the tail so that the samples divide evenly over the ranks. False: repeat samples from the front.
  bool drop_last = false;
};

/// Partitions the indices 0 .. size-1 over the ranks. Yields the same indices as Python's
/// torch.utils.data.DistributedSampler for the same arguments.
class DistributedSampler : public ResumableSampler {
 public:
  /// `size`: number of samples in the data set. Throws InvalidArgument if there are too few samples for one per rank.
  /// Not collective.
  DistributedSampler(std::size_t size, const ProcessGroup& group, const DistributedSamplerOptions& options = {});
  /// Takes rank and world size instead of a group.
  DistributedSampler(std::size_t size, int world_size, int rank, const DistributedSamplerOptions& options = {});
};

}  // namespace ddpkit
