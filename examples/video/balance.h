// Balances classes with few trials.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include <ddpkit/data/distributed_sampler.h>
#include <ddpkit/data/distributed_weighted_sampler.h>

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

/// This rank's trials of each epoch, in order, the same number on all ranks. Shuffled, or with kSampler drawn by the
/// weights of their classes. Resumes within an epoch as the samplers do: see DistributedSampler::load().
class TrialSampler {
 public:
  TrialSampler(const TrialSet& set, const std::vector<std::size_t>& trials, const std::vector<double>& class_weights,
               Balance balance, std::uint64_t seed, const ddpkit::ProcessGroup& group);

  void set_epoch(std::int64_t epoch);
  /// Indices in the set. [sample]
  std::vector<std::size_t> trials() const;
  std::size_t num_samples() const;  ///< Per epoch.
  /// The first `position` of trials() have been used.
  void set_position(std::size_t position);
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  std::vector<std::size_t> trials_;
  std::variant<ddpkit::DistributedSampler, ddpkit::DistributedWeightedSampler> sampler_;
};

}  // namespace video
