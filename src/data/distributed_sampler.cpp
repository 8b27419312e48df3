#include <ddpkit/data/distributed_sampler.h>

#include <fmt/format.h>

#include <cstdio>
#include <numeric>
#include <string>

#include <ddpkit/error.h>

#include "data/sampling.h"

namespace ddpkit {
namespace {

class DistributedImpl final : public ResumableSampler::Impl {
 public:
  DistributedImpl(std::size_t size, int world_size, int rank, const DistributedSamplerOptions& options)
      : ResumableSampler::Impl(size, world_size, rank), options_(options) {
    length_for(size);
  }

 private:
  Indices draw(std::uint64_t epoch, std::size_t begin) const override {
    Indices all(length());
    if (options_.shuffle)
      all = sampling::shuffled(length(), sampling::generator_of(options_.seed, epoch));
    else
      std::iota(all.begin(), all.end(), std::size_t{0});
    Indices mine;
    mine.reserve(num_samples(begin));
    // Padding repeats the beginning of the list.
    for (std::size_t i = 0; i < num_samples(begin); ++i)
      mine.push_back(all[(begin + rank() + i * world_size()) % length()]);
    return mine;
  }

  std::size_t share_of(std::size_t left) const override {
    // drop_last: `left` rounded down to a multiple of world_size. Padding: rounded up.
    return (left + (options_.drop_last ? 0 : world_size() - 1)) / world_size();
  }

  std::size_t length_for(std::size_t size) const override {
    if (share_of(size) == 0)
      throw InvalidArgument(fmt::format("{} samples cannot be dealt to {} ranks{}", size, world_size(),
                                        options_.drop_last ? " without repeating any" : ""));
    return size;
  }

  void note_repetition() override {
    if (rank() != 0 || !options_.shuffle || warned_) return;
    warned_ = true;
    const std::string text = fmt::format(
        "[ddpkit] DistributedSampler: epoch {} begins for the second time, with its samples in the same order; call "
        "sampler.set_epoch(epoch) before each epoch\n",
        epoch());
    std::fwrite(text.data(), 1, text.size(), stderr);
  }

  DistributedSamplerOptions options_;
  bool warned_ = false;
};

}  // namespace

DistributedSampler::DistributedSampler(std::size_t size, int world_size, int rank,
                                       const DistributedSamplerOptions& options)
    : ResumableSampler(std::make_shared<DistributedImpl>(size, world_size, rank, options)) {}

DistributedSampler::DistributedSampler(std::size_t size, const ProcessGroup& group,
                                       const DistributedSamplerOptions& options)
    : DistributedSampler(size, group.world_size(), group.rank(), options) {}

}  // namespace ddpkit
