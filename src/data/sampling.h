// What all samplers do alike.
#pragma once

#include <ATen/core/Generator.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace ddpkit::sampling {

using Indices = std::vector<std::size_t>;

/// Throws InvalidArgument.
void check_rank(int world_size, int rank);

/// What Python's samplers shuffle by: a generator of their own, seeded by seed + epoch.
at::Generator generator_of(std::uint64_t seed, std::uint64_t epoch);
/// 0 .. size-1, shuffled by torch.randperm.
Indices shuffled(std::size_t size, const at::Generator& generator);

/// Up to `batch_size` of `order` from `position` on, which moves; nothing at the end.
std::optional<Indices> take(const Indices& order, std::size_t& position, std::size_t batch_size);

struct Position {
  std::uint64_t epoch = 0;
  std::size_t position = 0;  ///< In the epoch.
};

void save_position(torch::serialize::OutputArchive& archive, const Position& position);
/// Throws InvalidArgument for a position beyond the `count` of `unit` ("sample", "batch") that an epoch has.
Position load_position(torch::serialize::InputArchive& archive, std::size_t count, const char* unit);

}  // namespace ddpkit::sampling
