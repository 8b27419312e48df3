// Tier 0: the standard library only. What is done about classes of which there are few trials.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "video/options.h"
#include "video/trials.h"

namespace ddpkit {
class ProcessGroup;
}

namespace video {

/// The inverse of how many of `trials` (numbers in `set`) are of each class, so that the mean over the trials is 1; 0
/// for a class without any. All 1 with kNone. [class]
std::vector<double> weights_of_classes(const TrialSet& set, const std::vector<std::size_t>& trials, Balance balance);

/// This rank's trials of an epoch, in order, equally many on all ranks: shuffled, or with kSampler drawn by the weights
/// of their classes.
std::vector<std::size_t> epoch_order(const TrialSet& set, const std::vector<std::size_t>& trials,
                                     const std::vector<double>& class_weights, Balance balance, std::uint64_t seed,
                                     std::int64_t epoch, const ddpkit::ProcessGroup& group);

}  // namespace video
