#include <ddpkit/data/length_bucketed_sampler.h>

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include <ddpkit/error.h>

#include "data/length_bucketed_sampler.h"

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

LengthBucketedSampler::Impl::Impl(std::vector<std::int64_t> lengths, int world_size, int rank,
                                  const LengthBucketedSamplerOptions& options)
    : lengths_(std::move(lengths)), options_(options) {
  set_rank(world_size, rank);
  if (options_.batches_per_bucket < 1) throw InvalidArgument("batches_per_bucket is 0: at least 1");
  if (lengths_.empty() || (options_.drop_last && lengths_.size() < options_.batch_size))
    throw InvalidArgument(fmt::format("{} samples make no batch of {}", lengths_.size(), options_.batch_size));
  for (std::size_t sample = 0; sample < lengths_.size(); ++sample) {
    if (lengths_[sample] < 0)
      throw InvalidArgument(fmt::format("sample {} has length {}: at least 0", sample, lengths_[sample]));
  }
  draw();
}

void LengthBucketedSampler::Impl::set_rank(int world_size, int rank) {
  sampling::check_rank(world_size, rank);
  if (options_.batch_size < static_cast<std::size_t>(world_size))
    throw InvalidArgument(
        fmt::format("a batch of {} samples cannot be divided among {} ranks", options_.batch_size, world_size));
  world_size_ = static_cast<std::size_t>(world_size);
  rank_ = static_cast<std::size_t>(rank);
}

void LengthBucketedSampler::Impl::draw() {
  const auto generator = sampling::generator_of(options_.seed, epoch);
  Indices order(lengths_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (options_.shuffle) order = sampling::shuffled(order.size(), generator);
  const auto is_longer = [this](std::size_t a, std::size_t b) { return lengths_[a] > lengths_[b]; };
  const std::size_t bucket = options_.shuffle ? options_.batch_size * options_.batches_per_bucket : order.size();
  std::vector<Indices> all;  // [batch]
  for (std::size_t begin = 0; begin < order.size(); begin += bucket) {
    const auto from = order.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto to = order.begin() + static_cast<std::ptrdiff_t>(std::min(begin + bucket, order.size()));
    // Samples of equal length keep their shuffled order.
    std::stable_sort(from, to, is_longer);
    for (auto at = from; at < to;
         at += std::min<std::ptrdiff_t>(static_cast<std::ptrdiff_t>(options_.batch_size), to - at))
      all.emplace_back(at, at + std::min<std::ptrdiff_t>(static_cast<std::ptrdiff_t>(options_.batch_size), to - at));
  }
  // All buckets except the last have full batches. The rest are the shortest samples of the last bucket.
  if (options_.drop_last && all.back().size() < options_.batch_size) all.pop_back();
  Indices turns(all.size());
  std::iota(turns.rbegin(), turns.rend(), std::size_t{0});
  if (options_.shuffle) turns = sampling::shuffled(all.size(), generator);

  batches.clear();
  double fullest = 0, sum = 0, padded = 0;
  for (const std::size_t turn : turns) {
    const Indices& samples = all[turn];
    std::vector<Indices> shares = deal(samples, lengths_, world_size_);
    std::int64_t most = 0;
    for (const Indices& share : shares) {
      std::int64_t total = 0;
      for (const std::size_t sample : share) total += lengths_[sample];
      most = std::max(most, total);
      sum += static_cast<double>(total);
      if (!share.empty()) padded += static_cast<double>(lengths_[share.front()]) * static_cast<double>(share.size());
    }
    fullest += static_cast<double>(most);
    LengthBucketedBatch mine{.indices = std::move(shares[rank_]), .repeated = 0, .batch_size = samples.size()};
    if (mine.indices.empty()) {
      mine.indices.push_back(samples[rank_ % samples.size()]);
      mine.repeated = 1;
    }
    batches.push_back(std::move(mine));
  }
  balance.fullest_over_mean = sum > 0 ? fullest * static_cast<double>(world_size_) / sum : 1;
  balance.padding = padded > 0 ? 1 - sum / padded : 0;
}

void LengthBucketedSampler::Impl::start_at(std::size_t batch) {
  start_ = batch;
  trained_ = 0;
  position = sampling::EpochPosition(batch);
}

void LengthBucketedSampler::Impl::set_epoch(std::uint64_t next) {
  const bool resumes = std::exchange(was_loaded, false) && next == epoch;
  if (resumes) return;
  start_at(0);
  if (next == epoch) return;
  epoch = next;
  draw();
}

void LengthBucketedSampler::Impl::regroup(int world_size, int rank) {
  set_rank(world_size, rank);
  draw();
  start_at(start_ + trained_);
  was_loaded = true;
}

void LengthBucketedSampler::Impl::save(torch::serialize::OutputArchive& archive) const {
  sampling::save_progress(archive, {epoch, position.trained()});
}

void LengthBucketedSampler::Impl::load(torch::serialize::InputArchive& archive) {
  const auto saved = sampling::load_progress(archive, batches.size(), "batch");
  set_epoch(saved.epoch);
  start_at(saved.taken);
  was_loaded = true;
}

LengthBucketedSampler::LengthBucketedSampler(std::vector<std::int64_t> lengths, int world_size, int rank,
                                             const LengthBucketedSamplerOptions& options)
    : impl_(std::make_shared<Impl>(std::move(lengths), world_size, rank, options)) {}

LengthBucketedSampler::LengthBucketedSampler(std::vector<std::int64_t> lengths, const ProcessGroup& group,
                                             const LengthBucketedSamplerOptions& options)
    : LengthBucketedSampler(std::move(lengths), group.world_size(), group.rank(), options) {}

std::uint64_t LengthBucketedSampler::epoch() const noexcept { return impl_->epoch; }
void LengthBucketedSampler::set_epoch(std::uint64_t epoch) { impl_->set_epoch(epoch); }
std::size_t LengthBucketedSampler::num_batches() const noexcept { return impl_->batches.size(); }
LengthBalance LengthBucketedSampler::balance() const noexcept { return impl_->balance; }
std::size_t LengthBucketedSampler::position() const noexcept { return impl_->position.last(); }
void LengthBucketedSampler::save(torch::serialize::OutputArchive& archive) const { impl_->save(archive); }
void LengthBucketedSampler::load(torch::serialize::InputArchive& archive) { impl_->load(archive); }

const std::vector<LengthBucketedBatch>& LengthBucketedSampler::batches() const noexcept {
  impl_->position.hand_out();
  return impl_->batches;
}

std::optional<LengthBucketedBatch> LengthBucketedSampler::next() {
  sampling::EpochPosition& position = impl_->position;
  if (position.dealt() == impl_->batches.size()) return std::nullopt;
  impl_->was_loaded = false;
  position.deal(1);
  return impl_->batches[position.dealt() - 1];
}

void LengthBucketedSampler::set_position(std::size_t position) {
  if (position > num_batches())
    throw InvalidArgument(fmt::format("there is no batch {} in an epoch of {}", position, num_batches()));
  impl_->was_loaded = false;
  impl_->position.set(position);
}

}  // namespace ddpkit
