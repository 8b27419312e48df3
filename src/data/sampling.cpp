#include "data/sampling.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include <ddpkit/error.h>

namespace ddpkit::sampling {

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

void check_progress(const Progress& saved, std::size_t count, const char* unit) {
  if (saved.taken > count)
    throw InvalidArgument(
        fmt::format("the saved sampler is at {} {}, but an epoch has only {} here", unit, saved.taken, count));
}

Walk::Walk(std::size_t length, int world_size, int rank)
    : length_(length), world_size_(static_cast<std::size_t>(world_size)), rank_(static_cast<std::size_t>(rank)) {
  check_rank(world_size, rank);
}

void Walk::set_length(std::size_t length) {
  if (was_loaded_) check_progress(progress_, length, "sample");
  length_ = length;
}

void Walk::set_epoch(std::uint64_t epoch) {
  if (epoch == progress_.epoch) return;
  progress_ = {.epoch = epoch};
  was_loaded_ = is_drawn_ = false;
  position_ = EpochPosition();
}

void Walk::reset(const Draw& draw) {
  if (!std::exchange(was_loaded_, false)) progress_.taken = 0;
  order_ = draw(progress_.epoch, progress_.taken);
  is_drawn_ = true;
  position_ = EpochPosition();
}

std::optional<Indices> Walk::next(std::size_t batch_size, const Draw& draw) {
  if (!is_drawn_) reset(draw);
  if (position_.dealt() >= order_.size()) return std::nullopt;
  const std::size_t count = std::min(order_.size() - position_.dealt(), batch_size);
  const auto begin = order_.begin() + static_cast<std::ptrdiff_t>(position_.dealt());
  position_.deal(count);
  was_loaded_ = false;
  return Indices(begin, begin + static_cast<std::ptrdiff_t>(count));
}

void Walk::set_position(std::optional<std::size_t> position, std::size_t left) {
  if (position > left) throw InvalidArgument(fmt::format("there is no sample {} where {} are left", *position, left));
  position_.set(position);
}

void Walk::save(torch::serialize::OutputArchive& archive) const {
  // Indices after the end of the order are padding.
  save_progress(archive, {progress_.epoch, std::min(length_, progress_.taken + position_.trained() * world_size_)});
}

void Walk::load(torch::serialize::InputArchive& archive, const Draw& draw) {
  progress_ = load_progress(archive, length_, "sample");
  was_loaded_ = is_drawn_ = true;
  order_ = draw(progress_.epoch, progress_.taken);
  position_ = EpochPosition();
}

}  // namespace ddpkit::sampling
