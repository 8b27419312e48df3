#include <ddpkit/data/distributed_weighted_sampler.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <random>

#include <ddpkit/comm/error.h>

#include "data/sampling.h"

namespace ddpkit {

struct DistributedWeightedSampler::State {
  std::vector<double> up_to;  ///< Sum of the weights up to and with each index. [index]
  std::size_t world_size = 1;
  std::size_t rank = 0;
  std::size_t samples = 0;  ///< Of each rank.
  std::uint64_t seed = 0;
  std::uint64_t epoch = 0;
  std::vector<std::size_t> order;  ///< This rank's indices for the epoch under way. [sample]
  std::size_t position = 0;

  std::vector<std::size_t> draw() const {
    // Seed and epoch both go through the engine's own mixing: neighbouring ones share nothing.
    std::seed_seq sequence{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32),
                           static_cast<std::uint32_t>(epoch), static_cast<std::uint32_t>(epoch >> 32)};
    std::mt19937_64 engine(sequence);
    std::vector<std::size_t> mine;
    mine.reserve(samples);
    for (std::size_t i = 0; i < samples * world_size; ++i) {
      const double point = static_cast<double>(engine() >> 11) * 0x1p-53 * up_to.back();
      if (i % world_size != rank) continue;
      // The first index whose sum lies beyond the point: never one of weight 0.
      const auto found = std::upper_bound(up_to.begin(), up_to.end(), point);
      mine.push_back(static_cast<std::size_t>(found - up_to.begin()));
    }
    return mine;
  }
};

DistributedWeightedSampler::DistributedWeightedSampler(std::vector<double> weights, int world_size, int rank,
                                                       const DistributedWeightedSamplerOptions& options)
    : state_(std::make_shared<State>()) {
  sampling::check_rank(world_size, rank);
  double sum = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (!std::isfinite(weights[i]) || weights[i] < 0)
      throw InvalidArgument(fmt::format("weight {} is {}: it must be a number of at least 0", i, weights[i]));
    sum += weights[i];
    weights[i] = sum;
  }
  if (!(sum > 0) || !std::isfinite(sum))
    throw InvalidArgument(fmt::format("the {} weights sum to {}: none could be drawn", weights.size(), sum));
  state_->world_size = static_cast<std::size_t>(world_size);
  state_->rank = static_cast<std::size_t>(rank);
  const std::size_t all = options.num_samples.value_or(weights.size());
  if (all == 0) throw InvalidArgument("num_samples is 0: an epoch needs at least one sample");
  state_->samples = (all + state_->world_size - 1) / state_->world_size;
  state_->seed = options.seed;
  state_->up_to = std::move(weights);
  reset();
}

DistributedWeightedSampler::DistributedWeightedSampler(std::vector<double> weights, const ProcessGroup& group,
                                                       const DistributedWeightedSamplerOptions& options)
    : DistributedWeightedSampler(std::move(weights), group.world_size(), group.rank(), options) {}

void DistributedWeightedSampler::set_epoch(std::uint64_t epoch) { state_->epoch = epoch; }
std::uint64_t DistributedWeightedSampler::epoch() const noexcept { return state_->epoch; }
std::size_t DistributedWeightedSampler::num_samples() const noexcept { return state_->samples; }
std::vector<std::size_t> DistributedWeightedSampler::indices() const { return state_->draw(); }

void DistributedWeightedSampler::reset(std::optional<std::size_t> new_size) {
  if (new_size && *new_size != state_->up_to.size())
    throw InvalidArgument(
        fmt::format("the sampler has {} weights and cannot be of {} samples", state_->up_to.size(), *new_size));
  state_->order = state_->draw();
  state_->position = 0;
}

std::optional<std::vector<std::size_t>> DistributedWeightedSampler::next(std::size_t batch_size) {
  return sampling::take(state_->order, state_->position, batch_size);
}

void DistributedWeightedSampler::save(torch::serialize::OutputArchive& archive) const {
  sampling::save_position(archive, {state_->epoch, state_->position});
}

void DistributedWeightedSampler::load(torch::serialize::InputArchive& archive) {
  const auto saved = sampling::load_position(archive, state_->samples, "sample");
  state_->epoch = saved.epoch;
  state_->order = state_->draw();
  state_->position = saved.position;
}

}  // namespace ddpkit
