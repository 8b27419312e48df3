#include <ddpkit/data/distributed_sampler.h>

#include <fmt/format.h>

#include <cstdio>
#include <numeric>

#include <ddpkit/error.h>

#include "data/sampling.h"

namespace ddpkit {

struct DistributedSampler::State {
  std::size_t size = 0;
  DistributedSamplerOptions options;
  sampling::Walk walk;
  bool seen = false;    ///< Samples were read since set_epoch() or load().
  bool warned = false;  ///< The warning about a missing set_epoch() was logged.

  /// Returns the samples per rank, for `left` samples of all ranks.
  std::size_t share_of(std::size_t left) const {
    // drop_last: `left` rounded down to a multiple of world_size. Padding: rounded up.
    return (left + (options.drop_last ? 0 : walk.world_size() - 1)) / walk.world_size();
  }
  std::size_t num_samples(std::size_t begin = 0) const { return share_of(size - begin); }

  /// Throws InvalidArgument before it changes anything.
  void set_size(std::size_t wanted) {
    if (share_of(wanted) == 0)
      throw InvalidArgument(fmt::format("{} samples cannot be dealt to {} ranks{}", wanted, walk.world_size(),
                                        options.drop_last ? " without repeating any" : ""));
    walk.set_length(wanted);
    size = wanted;
  }

  std::vector<std::size_t> draw(std::uint64_t epoch, std::size_t begin) const {
    std::vector<std::size_t> all(size);
    if (options.shuffle)
      all = sampling::shuffled(size, sampling::generator_of(options.seed, epoch));
    else
      std::iota(all.begin(), all.end(), std::size_t{0});
    std::vector<std::size_t> mine;
    mine.reserve(num_samples(begin));
    // Padding repeats the beginning of the list.
    for (std::size_t i = 0; i < num_samples(begin); ++i)
      mine.push_back(all[(begin + walk.rank() + i * walk.world_size()) % size]);
    return mine;
  }
  sampling::Walk::Draw drawing() const {
    return [this](std::uint64_t epoch, std::size_t begin) { return draw(epoch, begin); };
  }
};

DistributedSampler::DistributedSampler(std::size_t size, int world_size, int rank,
                                       const DistributedSamplerOptions& options)
    : state_(std::make_shared<State>(
          State{.size = size, .options = options, .walk = sampling::Walk(size, world_size, rank)})) {
  reset(size);
}

DistributedSampler::DistributedSampler(std::size_t size, const ProcessGroup& group,
                                       const DistributedSamplerOptions& options)
    : DistributedSampler(size, group.world_size(), group.rank(), options) {}

void DistributedSampler::set_epoch(std::uint64_t epoch) {
  state_->walk.set_epoch(epoch);
  state_->seen = false;
}

std::uint64_t DistributedSampler::epoch() const noexcept { return state_->walk.epoch(); }

std::size_t DistributedSampler::num_samples() const noexcept { return state_->num_samples(); }

std::vector<std::size_t> DistributedSampler::indices() const { return state_->walk.indices(state_->drawing()); }

void DistributedSampler::reset(std::optional<std::size_t> new_size) {
  if (new_size) state_->set_size(*new_size);
  if (state_->seen && state_->options.shuffle && !state_->warned) {
    state_->warned = true;
    if (state_->walk.rank() == 0) {
      const std::string text = fmt::format(
          "[ddpkit] DistributedSampler: epoch {} begins for the second time, with its samples in the same order; call "
          "sampler.set_epoch(epoch) before each epoch\n",
          epoch());
      std::fwrite(text.data(), 1, text.size(), stderr);
    }
  }
  state_->walk.reset(state_->drawing());
}

std::optional<std::vector<std::size_t>> DistributedSampler::next(std::size_t batch_size) {
  auto batch = state_->walk.next(batch_size, state_->drawing());
  if (batch) state_->seen = true;
  return batch;
}

void DistributedSampler::set_position(std::optional<std::size_t> position) {
  state_->walk.set_position(position, state_->num_samples(state_->walk.taken()));
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const { state_->walk.save(archive); }

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  state_->walk.load(archive, state_->drawing());
  state_->seen = false;
}

}  // namespace ddpkit
