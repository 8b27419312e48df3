#include "video/balance.h"

#include <ddpkit/data/distributed_sampler.h>
#include <ddpkit/data/distributed_weighted_sampler.h>

namespace video {

std::vector<double> weights_of_classes(const TrialSet& set, const std::vector<std::size_t>& trials, Balance balance) {
  std::vector<double> counts(set.class_names.size()), weights(counts.size(), 1);
  if (balance == Balance::kNone) return weights;
  for (const std::size_t i : trials) ++counts[static_cast<std::size_t>(set.trials[i].label)];
  double present = 0;
  for (const double count : counts) present += count > 0;
  for (std::size_t k = 0; k < counts.size(); ++k)
    weights[k] = counts[k] > 0 ? static_cast<double>(trials.size()) / (present * counts[k]) : 0;
  return weights;
}

std::vector<std::size_t> epoch_order(const TrialSet& set, const std::vector<std::size_t>& trials,
                                     const std::vector<double>& class_weights, Balance balance, std::uint64_t seed,
                                     std::int64_t epoch, const ddpkit::ProcessGroup& group) {
  std::vector<std::size_t> order;
  if (balance == Balance::kSampler) {
    std::vector<double> weights;
    for (const std::size_t i : trials) weights.push_back(class_weights[static_cast<std::size_t>(set.trials[i].label)]);
    ddpkit::DistributedWeightedSampler sampler(std::move(weights), group, {.seed = seed});
    sampler.set_epoch(static_cast<std::uint64_t>(epoch));
    order = sampler.indices();
  } else {
    ddpkit::DistributedSampler sampler(trials.size(), group, {.seed = seed});
    sampler.set_epoch(static_cast<std::uint64_t>(epoch));
    order = sampler.indices();
  }
  for (std::size_t& place : order) place = trials[place];
  return order;
}

}  // namespace video
