// Balances classes with few trials.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ddpkit/comm/process_group.h>
#include <ddpkit/data/resumable_sampler.h>

#include "video/options.h"
#include "video/trials.h"

namespace video {

/// Returns weights proportional to the inverse number of `trials` (indices in `set`) of each class. The mean over the
/// trials is 1. A class without trials has 0. All 1 with kNone. [class]
std::vector<double> weights_of_classes(const TrialSet& set, const std::vector<std::size_t>& trials, Balance balance);

/// Formats a table for a terminal: how many of `trials` (indices in `set`) each class has, and its weight. `weights`:
/// [class].
std::string class_table(const TrialSet& set, const std::vector<std::size_t>& trials,
                        const std::vector<double>& weights);

/// Returns a sampler of `trials`: shuffled, or with kSampler drawn by the weights of their classes. `class_weights`:
/// [class].
ddpkit::ResumableSampler make_sampler(const TrialSet& set, const std::vector<std::size_t>& trials,
                                      const std::vector<double>& class_weights, Balance balance, std::uint64_t seed,
                                      const ddpkit::ProcessGroup& group);

}  // namespace video
