#include "data/sampling.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>
#include <fmt/format.h>

#include <algorithm>

#include <ddpkit/comm/error.h>

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

std::optional<Indices> take(const Indices& order, std::size_t& position, std::size_t batch_size) {
  const std::size_t count = std::min(order.size() - position, batch_size);
  if (position == order.size()) return std::nullopt;
  const auto begin = order.begin() + static_cast<std::ptrdiff_t>(position);
  position += count;
  return Indices(begin, begin + static_cast<std::ptrdiff_t>(count));
}

void save_position(torch::serialize::OutputArchive& archive, const Position& position) {
  const auto write = [&](const char* name, std::size_t value) {
    archive.write(name, torch::tensor(static_cast<std::int64_t>(value), torch::kLong), /*is_buffer=*/true);
  };
  write("epoch", position.epoch);
  write("position", position.position);
}

Position load_position(torch::serialize::InputArchive& archive, std::size_t count, const char* unit) {
  const auto read = [&](const char* name) {
    torch::Tensor value;
    archive.read(name, value, /*is_buffer=*/true);
    return static_cast<std::size_t>(value.item<std::int64_t>());
  };
  const Position saved{.epoch = read("epoch"), .position = read("position")};
  if (saved.position > count)
    throw InvalidArgument(
        fmt::format("the saved sampler stands at {} {}, but an epoch has only {} here", unit, saved.position, count));
  return saved;
}

}  // namespace ddpkit::sampling
