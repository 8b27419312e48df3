#include "data/sampling.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include <ddpkit/error.h>

namespace ddpkit {
namespace sampling {

void check_rank(int world_size, int rank) {
  if (world_size < 1 || rank < 0 || rank >= world_size)
    throw InvalidArgument(fmt::format("there is no rank {} in a world of {}", rank, world_size));
}

at::Generator generator_of(std::uint64_t seed, std::uint64_t epoch) {
  return at::make_generator<at::CPUGeneratorImpl>(seed + epoch);
}

Indices shuffled(std::size_t size, const at::Generator& generator) {
  const at::Tensor permutation = at::randperm(static_cast<std::int64_t>(size), generator, at::kLong);
  const auto* values = permutation.const_data_ptr<std::int64_t>();
  return {values, values + size};
}

void save_progress(torch::serialize::OutputArchive& archive, const Progress& progress) {
  const auto write = [&](const char* name, std::size_t value) {
    archive.write(name, torch::tensor(static_cast<std::int64_t>(value), torch::kLong), /*is_buffer=*/true);
  };
  write("epoch", progress.epoch);
  write("taken", progress.taken);
}

void check_progress(const Progress& saved, std::size_t count, const char* unit) {
  if (saved.taken > count)
    throw InvalidArgument(
        fmt::format("the saved sampler is at {} {}, but an epoch has only {} here", unit, saved.taken, count));
}

Progress load_progress(torch::serialize::InputArchive& archive, std::size_t count, const char* unit) {
  const auto read = [&](const char* name) {
    torch::Tensor value;
    archive.read(name, value, /*is_buffer=*/true);
    return static_cast<std::size_t>(value.item<std::int64_t>());
  };
  const Progress saved{.epoch = read("epoch"), .taken = read("taken")};
  check_progress(saved, count, unit);
  return saved;
}

void EpochPosition::deal(std::size_t count) noexcept {
  dealt_ += count;
  thread_ = std::this_thread::get_id();
}

void EpochPosition::hand_out() const noexcept {
  std::atomic_ref(is_handed_out_).store(true, std::memory_order_relaxed);
}

void EpochPosition::set(std::optional<std::size_t> trained) noexcept {
  is_set_ = true;
  trained_ = trained;
  dealt_ = std::max(dealt_, trained.value_or(0));
  thread_ = std::this_thread::get_id();
}

std::size_t EpochPosition::trained() const {
  constexpr const char* kRemedy = "call set_position() before save(), or set_epoch() after the epoch";
  const bool has_moved = thread_ != std::thread::id();
  if (is_set_ && !trained_)
    throw InvalidArgument(
        std::string("the sampler cannot be saved within the epoch: the data loader delivers batches in any order "
                    "(enforce_ordering is false), so no position describes them; ") +
        kRemedy);
  if (!has_moved && std::atomic_ref(is_handed_out_).load(std::memory_order_relaxed))
    throw InvalidArgument(
        std::string("the sampler cannot be saved: the whole epoch was taken from it at once, and it does not know how "
                    "much of it the model has trained on; ") +
        kRemedy);
  if (has_moved && thread_ != std::this_thread::get_id())
    throw InvalidArgument(
        std::string("the sampler cannot be saved: another thread has taken its samples, and may be ahead of the "
                    "training; ") +
        kRemedy);
  return last();
}

}  // namespace sampling

using sampling::Indices;

ResumableSampler::Impl::Impl(std::size_t length, int world_size, int rank)
    : length_(length), world_size_(static_cast<std::size_t>(world_size)), rank_(static_cast<std::size_t>(rank)) {
  sampling::check_rank(world_size, rank);
}

void ResumableSampler::Impl::set_epoch(std::uint64_t epoch) {
  was_read_ = false;
  if (epoch == progress_.epoch) return;
  progress_ = {.epoch = epoch};
  was_loaded_ = is_drawn_ = false;
  restart_counts();
}

Indices ResumableSampler::Impl::indices() const {
  position_.hand_out();
  return draw(progress_.epoch, progress_.taken);
}

void ResumableSampler::Impl::reset(std::optional<std::size_t> new_size) {
  if (new_size) {
    const std::size_t length = length_for(*new_size);
    if (was_loaded_) sampling::check_progress(progress_, length, "sample");
    length_ = length;
  }
  if (was_read_) note_repetition();
  if (!std::exchange(was_loaded_, false)) progress_.taken = 0;
  order_ = draw(progress_.epoch, progress_.taken);
  is_drawn_ = true;
  restart_counts();
}

std::optional<Indices> ResumableSampler::Impl::next(std::size_t batch_size) {
  if (!is_drawn_) reset(std::nullopt);
  if (position_.dealt() >= order_.size()) return std::nullopt;
  const std::size_t count = std::min(order_.size() - position_.dealt(), batch_size);
  const auto begin = order_.begin() + static_cast<std::ptrdiff_t>(position_.dealt());
  position_.deal(count);
  was_loaded_ = false;
  was_read_ = true;
  return Indices(begin, begin + static_cast<std::ptrdiff_t>(count));
}

void ResumableSampler::Impl::set_position(std::optional<std::size_t> position) {
  const std::size_t left = num_samples(progress_.taken);
  if (position > left) throw InvalidArgument(fmt::format("there is no sample {} where {} are left", *position, left));
  position_.set(position);
}

void ResumableSampler::Impl::save(torch::serialize::OutputArchive& archive) const {
  // Indices after the end of the order are padding.
  sampling::save_progress(archive,
                          {progress_.epoch, std::min(length_, progress_.taken + position_.trained() * world_size_)});
}

/// Continues from the loaded or kept progress.
void ResumableSampler::Impl::resume() {
  was_loaded_ = is_drawn_ = true;
  was_read_ = false;
  order_ = draw(progress_.epoch, progress_.taken);
  restart_counts();
}

void ResumableSampler::Impl::regroup(int world_size, int rank) {
  sampling::check_rank(world_size, rank);
  // Indices after the end of the order are padding.
  progress_.taken = std::min(length_, progress_.taken + trained_ * world_size_);
  world_size_ = static_cast<std::size_t>(world_size);
  rank_ = static_cast<std::size_t>(rank);
  resume();
}

void ResumableSampler::Impl::load(torch::serialize::InputArchive& archive) {
  progress_ = sampling::load_progress(archive, length_, "sample");
  resume();
}

ResumableSampler::ResumableSampler(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) { impl_->reset(std::nullopt); }
void ResumableSampler::set_epoch(std::uint64_t epoch) { impl_->set_epoch(epoch); }
std::uint64_t ResumableSampler::epoch() const noexcept { return impl_->epoch(); }
std::size_t ResumableSampler::num_samples() const noexcept { return impl_->num_samples(); }
std::vector<std::size_t> ResumableSampler::indices() const { return impl_->indices(); }
void ResumableSampler::reset(std::optional<std::size_t> new_size) { impl_->reset(new_size); }
std::optional<std::vector<std::size_t>> ResumableSampler::next(std::size_t batch_size) {
  return impl_->next(batch_size);
}
void ResumableSampler::set_position(std::optional<std::size_t> position) { impl_->set_position(position); }
void ResumableSampler::save(torch::serialize::OutputArchive& archive) const { impl_->save(archive); }
void ResumableSampler::load(torch::serialize::InputArchive& archive) { impl_->load(archive); }

}  // namespace ddpkit
