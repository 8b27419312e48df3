#include "video/balance.h"

#include <fmt/format.h>

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

ddpkit::ResumableSampler make_sampler(const TrialSet& set, const std::vector<std::size_t>& trials,
                                      const std::vector<double>& class_weights, Balance balance, std::uint64_t seed,
                                      const ddpkit::ProcessGroup& group) {
  if (balance != Balance::kSampler) return ddpkit::DistributedSampler(trials.size(), group, {.seed = seed});
  std::vector<double> weights;
  for (const std::size_t i : trials) weights.push_back(class_weights[static_cast<std::size_t>(set.trials[i].label)]);
  return ddpkit::DistributedWeightedSampler(std::move(weights), group, {.seed = seed});
}

std::string class_table(const TrialSet& set, const std::vector<std::size_t>& trials,
                        const std::vector<double>& weights) {
  std::vector<std::int64_t> counts(set.class_names.size());
  for (const std::size_t i : trials) ++counts[static_cast<std::size_t>(set.trials[i].label)];
  const std::string rule(60, '=');
  std::string table = fmt::format("{0}\nClass Distribution and Weights\n{0}\n", rule);
  for (std::size_t k = 0; k < counts.size(); ++k)
    table +=
        fmt::format("Class {} ({:<15}): {:>6} samples ({:5.2f}%) -> weight: {:.4f}\n", k, set.class_names[k], counts[k],
                    100.0 * static_cast<double>(counts[k]) / static_cast<double>(trials.size()), weights[k]);
  return table + rule;
}

}  // namespace video
