#include <ddpkit/data/distributed_sampler.h>

#include <fmt/format.h>

#include <cstdio>
#include <numeric>

#include <ddpkit/comm/error.h>

#include "data/sampling.h"

namespace ddpkit {

struct DistributedSampler::State {
  std::size_t size = 0;
  std::size_t world_size = 1;
  std::size_t rank = 0;
  DistributedSamplerOptions options;
  std::uint64_t epoch = 0;
  std::vector<std::size_t> order;  ///< This rank's indices for the epoch under way. [sample]
  std::size_t position = 0;
  bool seen = false;    ///< Samples have been taken since set_epoch() or load().
  bool warned = false;  ///< That set_epoch() was forgotten.

  std::size_t num_samples() const {
    // Dropping the tail: the largest multiple of world_size; padding: the smallest. Both divided by world_size.
    return options.drop_last ? size / world_size : (size + world_size - 1) / world_size;
  }

  void check() const {
    if (num_samples() == 0)
      throw InvalidArgument(fmt::format("{} samples cannot be dealt to {} ranks{}", size, world_size,
                                        options.drop_last ? " without repeating any" : ""));
  }

  std::vector<std::size_t> draw() const {
    std::vector<std::size_t> all(size);
    if (options.shuffle)
      all = sampling::shuffled(size, sampling::generator_of(options.seed, epoch));
    else
      std::iota(all.begin(), all.end(), std::size_t{0});
    std::vector<std::size_t> mine;
    mine.reserve(num_samples());
    // Past the end the list starts over, which is the padding.
    for (std::size_t i = 0; i < num_samples(); ++i) mine.push_back(all[(rank + i * world_size) % size]);
    return mine;
  }
};

DistributedSampler::DistributedSampler(std::size_t size, int world_size, int rank,
                                       const DistributedSamplerOptions& options)
    : state_(std::make_shared<State>()) {
  sampling::check_rank(world_size, rank);
  state_->size = size;
  state_->world_size = static_cast<std::size_t>(world_size);
  state_->rank = static_cast<std::size_t>(rank);
  state_->options = options;
  state_->check();
  reset();
}

DistributedSampler::DistributedSampler(std::size_t size, const ProcessGroup& group,
                                       const DistributedSamplerOptions& options)
    : DistributedSampler(size, group.world_size(), group.rank(), options) {}

void DistributedSampler::set_epoch(std::uint64_t epoch) {
  state_->epoch = epoch;
  state_->seen = false;
}

std::uint64_t DistributedSampler::epoch() const noexcept { return state_->epoch; }

std::size_t DistributedSampler::num_samples() const noexcept { return state_->num_samples(); }

std::vector<std::size_t> DistributedSampler::indices() const { return state_->draw(); }

void DistributedSampler::reset(std::optional<std::size_t> new_size) {
  if (new_size) {
    state_->size = *new_size;
    state_->check();
  }
  if (state_->seen && state_->options.shuffle && !state_->warned) {
    state_->warned = true;
    if (state_->rank == 0) {
      const std::string text = fmt::format(
          "[ddpkit] DistributedSampler: epoch {} begins for the second time, with its samples in the same order; call "
          "sampler.set_epoch(epoch) before each epoch\n",
          state_->epoch);
      std::fwrite(text.data(), 1, text.size(), stderr);
    }
  }
  state_->order = state_->draw();
  state_->position = 0;
}

std::optional<std::vector<std::size_t>> DistributedSampler::next(std::size_t batch_size) {
  auto batch = sampling::take(state_->order, state_->position, batch_size);
  if (batch) state_->seen = true;
  return batch;
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  sampling::save_position(archive, {state_->epoch, state_->position});
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  const auto saved = sampling::load_position(archive, num_samples(), "sample");
  state_->epoch = saved.epoch;
  state_->seen = false;
  state_->order = state_->draw();
  state_->position = saved.position;
}

}  // namespace ddpkit
