#include <ddpkit/data/length_bucketed_sampler.h>

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include <ddpkit/error.h>

#include "data/sampling.h"

namespace ddpkit {
namespace {

using sampling::Indices;

// Distributes the samples of one batch to the ranks, from the longest to the shortest. [rank]
std::vector<Indices> deal(const Indices& samples, const std::vector<std::int64_t>& lengths, std::size_t world_size) {
  const std::size_t least = samples.size() / world_size;
  std::size_t with_one_more = samples.size() % world_size;  // Ranks that may receive one more than `least`.
  std::vector<Indices> shares(world_size);
  std::vector<std::int64_t> totals(world_size, 0);
  for (const std::size_t sample : samples) {
    std::size_t best = world_size;
    for (std::size_t rank = 0; rank < world_size; ++rank) {
      const std::size_t count = shares[rank].size();
      const bool is_open = count < least || (count == least && with_one_more > 0);
      if (is_open && (best == world_size || totals[rank] < totals[best])) best = rank;
    }
    if (shares[best].size() == least) --with_one_more;
    shares[best].push_back(sample);
    totals[best] += lengths[sample];
  }
  return shares;
}

}  // namespace

struct LengthBucketedSampler::State {
  std::vector<std::int64_t> lengths;
  std::size_t world_size;
  std::size_t rank;
  LengthBucketedSamplerOptions options;
  std::uint64_t epoch = 0;
  bool was_loaded = false;
  sampling::EpochPosition position = sampling::EpochPosition();
  std::vector<LengthBucketedBatch> batches = {};
  LengthBalance balance = {};

  void draw();
};

LengthBucketedSampler::LengthBucketedSampler(std::vector<std::int64_t> lengths, int world_size, int rank,
                                             const LengthBucketedSamplerOptions& options)
    : state_(std::make_shared<State>(State{.lengths = std::move(lengths),
                                           .world_size = static_cast<std::size_t>(world_size),
                                           .rank = static_cast<std::size_t>(rank),
                                           .options = options})) {
  sampling::check_rank(world_size, rank);
  if (options.batch_size < state_->world_size)
    throw InvalidArgument(
        fmt::format("a batch of {} samples cannot be divided among {} ranks", options.batch_size, world_size));
  if (options.batches_per_bucket < 1) throw InvalidArgument("batches_per_bucket is 0: at least 1");
  const std::vector<std::int64_t>& all = state_->lengths;
  if (all.empty() || (options.drop_last && all.size() < options.batch_size))
    throw InvalidArgument(fmt::format("{} samples make no batch of {}", all.size(), options.batch_size));
  for (std::size_t sample = 0; sample < all.size(); ++sample) {
    if (all[sample] < 0) throw InvalidArgument(fmt::format("sample {} has length {}: at least 0", sample, all[sample]));
  }
  state_->draw();
}

LengthBucketedSampler::LengthBucketedSampler(std::vector<std::int64_t> lengths, const ProcessGroup& group,
                                             const LengthBucketedSamplerOptions& options)
    : LengthBucketedSampler(std::move(lengths), group.world_size(), group.rank(), options) {}

void LengthBucketedSampler::State::draw() {
  const auto generator = sampling::generator_of(options.seed, epoch);
  Indices order(lengths.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (options.shuffle) order = sampling::shuffled(order.size(), generator);
  const auto is_longer = [this](std::size_t a, std::size_t b) { return lengths[a] > lengths[b]; };
  const std::size_t bucket = options.shuffle ? options.batch_size * options.batches_per_bucket : order.size();
  std::vector<Indices> all;  // [batch]
  for (std::size_t begin = 0; begin < order.size(); begin += bucket) {
    const auto from = order.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto to = order.begin() + static_cast<std::ptrdiff_t>(std::min(begin + bucket, order.size()));
    // Samples of equal length keep their shuffled order.
    std::stable_sort(from, to, is_longer);
    for (auto at = from; at < to;
         at += std::min<std::ptrdiff_t>(static_cast<std::ptrdiff_t>(options.batch_size), to - at))
      all.emplace_back(at, at + std::min<std::ptrdiff_t>(static_cast<std::ptrdiff_t>(options.batch_size), to - at));
  }
  // All buckets except the last have full batches. The rest are the shortest samples of the last bucket.
  if (options.drop_last && all.back().size() < options.batch_size) all.pop_back();
  Indices turns(all.size());
  std::iota(turns.rbegin(), turns.rend(), std::size_t{0});
  if (options.shuffle) turns = sampling::shuffled(all.size(), generator);

  batches.clear();
  double fullest = 0, sum = 0, padded = 0;
  for (const std::size_t turn : turns) {
    const Indices& samples = all[turn];
    std::vector<Indices> shares = deal(samples, lengths, world_size);
    std::int64_t most = 0;
    for (const Indices& share : shares) {
      std::int64_t total = 0;
      for (const std::size_t sample : share) total += lengths[sample];
      most = std::max(most, total);
      sum += static_cast<double>(total);
      if (!share.empty()) padded += static_cast<double>(lengths[share.front()]) * static_cast<double>(share.size());
    }
    fullest += static_cast<double>(most);
    LengthBucketedBatch mine{.indices = std::move(shares[rank]), .repeated = 0, .batch_size = samples.size()};
    if (mine.indices.empty()) {
      mine.indices.push_back(samples[rank % samples.size()]);
      mine.repeated = 1;
    }
    batches.push_back(std::move(mine));
  }
  balance.fullest_over_mean = sum > 0 ? fullest * static_cast<double>(world_size) / sum : 1;
  balance.padding = padded > 0 ? 1 - sum / padded : 0;
}

std::uint64_t LengthBucketedSampler::epoch() const noexcept { return state_->epoch; }
std::size_t LengthBucketedSampler::num_batches() const noexcept { return state_->batches.size(); }
LengthBalance LengthBucketedSampler::balance() const noexcept { return state_->balance; }
std::size_t LengthBucketedSampler::position() const noexcept { return state_->position.last(); }

const std::vector<LengthBucketedBatch>& LengthBucketedSampler::batches() const noexcept {
  state_->position.hand_out();
  return state_->batches;
}

void LengthBucketedSampler::set_epoch(std::uint64_t epoch) {
  const bool resumes = std::exchange(state_->was_loaded, false) && epoch == state_->epoch;
  if (resumes) return;
  state_->position = sampling::EpochPosition();
  if (epoch == state_->epoch) return;
  state_->epoch = epoch;
  state_->draw();
}

std::optional<LengthBucketedBatch> LengthBucketedSampler::next() {
  sampling::EpochPosition& position = state_->position;
  if (position.dealt() == state_->batches.size()) return std::nullopt;
  state_->was_loaded = false;
  position.deal(1);
  return state_->batches[position.dealt() - 1];
}

void LengthBucketedSampler::set_position(std::size_t position) {
  if (position > num_batches())
    throw InvalidArgument(fmt::format("there is no batch {} in an epoch of {}", position, num_batches()));
  state_->was_loaded = false;
  state_->position.set(position);
}

void LengthBucketedSampler::save(torch::serialize::OutputArchive& archive) const {
  sampling::save_progress(archive, {state_->epoch, state_->position.trained()});
}

void LengthBucketedSampler::load(torch::serialize::InputArchive& archive) {
  const auto saved = sampling::load_progress(archive, num_batches(), "batch");
  set_epoch(saved.epoch);
  state_->position = sampling::EpochPosition(saved.taken);
  state_->was_loaded = true;
}

}  // namespace ddpkit
