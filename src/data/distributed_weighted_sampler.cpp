#include <ddpkit/data/distributed_weighted_sampler.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <random>

#include <ddpkit/error.h>

#include "data/sampling.h"

namespace ddpkit {

struct DistributedWeightedSampler::State {
  std::vector<double> up_to;  ///< Cumulative sum of the weights, including this index. [index]
  std::size_t samples = 0;    ///< Samples of all ranks, before padding.
  std::uint64_t seed = 0;
  sampling::Walk walk;

  std::size_t num_samples(std::size_t begin = 0) const {
    return (samples - begin + walk.world_size() - 1) / walk.world_size();
  }

  std::vector<std::size_t> draw(std::uint64_t epoch, std::size_t begin) const {
    // The engine's seed sequence mixes seed and epoch: adjacent seeds and epochs give independent sequences.
    std::seed_seq sequence{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32),
                           static_cast<std::uint32_t>(epoch), static_cast<std::uint32_t>(epoch >> 32)};
    std::mt19937_64 engine(sequence);
    engine.discard(begin);
    std::vector<std::size_t> mine;
    mine.reserve(num_samples(begin));
    for (std::size_t i = 0; i < num_samples(begin) * walk.world_size(); ++i) {
      const double point = static_cast<double>(engine() >> 11) * 0x1p-53 * up_to.back();
      if (i % walk.world_size() != walk.rank()) continue;
      // The first index whose cumulative sum exceeds the point. Never an index with weight 0.
      const auto found = std::upper_bound(up_to.begin(), up_to.end(), point);
      mine.push_back(static_cast<std::size_t>(found - up_to.begin()));
    }
    return mine;
  }
  sampling::Walk::Draw drawing() const {
    return [this](std::uint64_t epoch, std::size_t begin) { return draw(epoch, begin); };
  }
};

DistributedWeightedSampler::DistributedWeightedSampler(std::vector<double> weights, int world_size, int rank,
                                                       const DistributedWeightedSamplerOptions& options)
    : state_(std::make_shared<State>(State{.up_to = {},
                                           .samples = options.num_samples.value_or(weights.size()),
                                           .seed = options.seed,
                                           .walk = sampling::Walk(0, world_size, rank)})) {
  double sum = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (!std::isfinite(weights[i]) || weights[i] < 0)
      throw InvalidArgument(fmt::format("weight {} is {}: it must be a number of at least 0", i, weights[i]));
    sum += weights[i];
    weights[i] = sum;
  }
  if (!(sum > 0) || !std::isfinite(sum))
    throw InvalidArgument(fmt::format("the {} weights sum to {}: none could be drawn", weights.size(), sum));
  if (state_->samples == 0) throw InvalidArgument("num_samples is 0: an epoch needs at least one sample");
  state_->walk.set_length(state_->samples);
  state_->up_to = std::move(weights);
  reset();
}

DistributedWeightedSampler::DistributedWeightedSampler(std::vector<double> weights, const ProcessGroup& group,
                                                       const DistributedWeightedSamplerOptions& options)
    : DistributedWeightedSampler(std::move(weights), group.world_size(), group.rank(), options) {}

void DistributedWeightedSampler::set_epoch(std::uint64_t epoch) { state_->walk.set_epoch(epoch); }
std::uint64_t DistributedWeightedSampler::epoch() const noexcept { return state_->walk.epoch(); }
std::size_t DistributedWeightedSampler::num_samples() const noexcept { return state_->num_samples(); }
std::vector<std::size_t> DistributedWeightedSampler::indices() const { return state_->walk.indices(state_->drawing()); }

void DistributedWeightedSampler::reset(std::optional<std::size_t> new_size) {
  if (new_size && *new_size != state_->up_to.size())
    throw InvalidArgument(
        fmt::format("the sampler has {} weights, which cannot become {} samples", state_->up_to.size(), *new_size));
  state_->walk.reset(state_->drawing());
}

std::optional<std::vector<std::size_t>> DistributedWeightedSampler::next(std::size_t batch_size) {
  return state_->walk.next(batch_size, state_->drawing());
}

void DistributedWeightedSampler::set_position(std::optional<std::size_t> position) {
  state_->walk.set_position(position, state_->num_samples(state_->walk.taken()));
}

void DistributedWeightedSampler::save(torch::serialize::OutputArchive& archive) const { state_->walk.save(archive); }

void DistributedWeightedSampler::load(torch::serialize::InputArchive& archive) {
  state_->walk.load(archive, state_->drawing());
}

}  // namespace ddpkit
