#include <ddpkit/data/distributed_weighted_sampler.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

#include <ddpkit/error.h>

#include "data/sampling.h"

namespace ddpkit {
namespace {

/// Returns the cumulative sums of the weights, each including its index. [index]
std::vector<double> cumulative(std::vector<double> weights) {
  double sum = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (!std::isfinite(weights[i]) || weights[i] < 0)
      throw InvalidArgument(fmt::format("weight {} is {}: it must be a number of at least 0", i, weights[i]));
    sum += weights[i];
    weights[i] = sum;
  }
  if (!(sum > 0) || !std::isfinite(sum))
    throw InvalidArgument(fmt::format("the {} weights sum to {}: none could be drawn", weights.size(), sum));
  return weights;
}

class WeightedImpl final : public ResumableSampler::Impl {
 public:
  WeightedImpl(std::vector<double> weights, int world_size, int rank, const DistributedWeightedSamplerOptions& options)
      : ResumableSampler::Impl(options.num_samples.value_or(weights.size()), world_size, rank),
        up_to_(cumulative(std::move(weights))),
        seed_(options.seed) {
    if (length() == 0) throw InvalidArgument("num_samples is 0: an epoch needs at least one sample");
  }

 private:
  Indices draw(std::uint64_t epoch, std::size_t begin) const override {
    // The engine's seed sequence mixes seed and epoch: adjacent seeds and epochs give independent sequences.
    std::seed_seq sequence{static_cast<std::uint32_t>(seed_), static_cast<std::uint32_t>(seed_ >> 32),
                           static_cast<std::uint32_t>(epoch), static_cast<std::uint32_t>(epoch >> 32)};
    std::mt19937_64 engine(sequence);
    engine.discard(begin);
    Indices mine;
    mine.reserve(num_samples(begin));
    for (std::size_t i = 0; i < num_samples(begin) * world_size(); ++i) {
      const double point = static_cast<double>(engine() >> 11) * 0x1p-53 * up_to_.back();
      if (i % world_size() != rank()) continue;
      // The first index whose cumulative sum exceeds the point. Never an index with weight 0.
      const auto found = std::upper_bound(up_to_.begin(), up_to_.end(), point);
      mine.push_back(static_cast<std::size_t>(found - up_to_.begin()));
    }
    return mine;
  }

  std::size_t length_for(std::size_t size) const override {
    if (size != up_to_.size())
      throw InvalidArgument(
          fmt::format("the sampler has {} weights, which cannot become {} samples", up_to_.size(), size));
    return length();
  }

  std::vector<double> up_to_;  ///< Cumulative sum of the weights, including this index. [index]
  std::uint64_t seed_;
};

}  // namespace

DistributedWeightedSampler::DistributedWeightedSampler(std::vector<double> weights, int world_size, int rank,
                                                       const DistributedWeightedSamplerOptions& options)
    : ResumableSampler(std::make_shared<WeightedImpl>(std::move(weights), world_size, rank, options)) {}

DistributedWeightedSampler::DistributedWeightedSampler(std::vector<double> weights, const ProcessGroup& group,
                                                       const DistributedWeightedSamplerOptions& options)
    : DistributedWeightedSampler(std::move(weights), group.world_size(), group.rank(), options) {}

}  // namespace ddpkit
