// Shared code of all samplers.
#pragma once

#include <ATen/core/Generator.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include <ddpkit/data/epoch_position.h>

namespace ddpkit::sampling {

using Indices = std::vector<std::size_t>;

/// Throws InvalidArgument.
void check_rank(int world_size, int rank);

/// Returns a generator as Python's samplers use it: separate, seeded by seed + epoch.
at::Generator generator_of(std::uint64_t seed, std::uint64_t epoch);
/// Returns 0 .. size-1, shuffled by torch.randperm.
Indices shuffled(std::size_t size, const at::Generator& generator);

/// The position of all ranks in an epoch. Any number of ranks can resume from this position.
struct Progress {
  std::uint64_t epoch = 0;
  std::size_t taken = 0;  ///< Samples or batches of the epoch's order, which all ranks share.
};

void save_progress(torch::serialize::OutputArchive& archive, const Progress& progress);
/// Throws InvalidArgument if more were taken than the `count` of `unit` ("sample", "batch") that an epoch has.
void check_progress(const Progress& saved, std::size_t count, const char* unit);
/// Throws as check_progress().
Progress load_progress(torch::serialize::InputArchive& archive, std::size_t count, const char* unit);

/// Iterates over the part of one rank. All ranks share the order of an epoch; rank r reads every world_size-th index.
class Walk {
 public:
  /// Returns this rank's part of the epoch's order, from index `begin` on.
  using Draw = std::function<Indices(std::uint64_t epoch, std::size_t begin)>;

  /// `length`: indices of an epoch's order, before padding. Throws InvalidArgument for an invalid rank.
  Walk(std::size_t length, int world_size, int rank);

  std::size_t world_size() const noexcept { return world_size_; }
  std::size_t rank() const noexcept { return rank_; }
  std::uint64_t epoch() const noexcept { return progress_.epoch; }
  /// Throws InvalidArgument if load() restored a position after `length`. Changes nothing then.
  void set_length(std::size_t length);
  void set_epoch(std::uint64_t epoch);

  /// Returns this rank's part of the epoch; after load(), the rest of it.
  Indices indices(const Draw& draw) const {
    position_.hand_out();
    return draw(progress_.epoch, progress_.taken);
  }
  /// Restarts the epoch. The first call after load() resumes from the loaded position.
  void reset(const Draw& draw);
  /// Returns up to `batch_size` indices, or nothing at the end. The first call after set_epoch() starts the new epoch.
  std::optional<Indices> next(std::size_t batch_size, const Draw& draw);
  /// Returns the indices of the epoch's order that were taken before this walk began.
  std::size_t taken() const noexcept { return progress_.taken; }
  /// The model has trained on `position` of the `left` remaining indices of this rank. Throws InvalidArgument for a
  /// larger position.
  void set_position(std::optional<std::size_t> position, std::size_t left);

  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive, const Draw& draw);

 private:
  std::size_t length_;
  std::size_t world_size_;
  std::size_t rank_;
  Progress progress_;  ///< The beginning of `order_`.
  bool was_loaded_ = false;
  Indices order_;           ///< This rank's part of the current epoch. [sample]
  bool is_drawn_ = false;   ///< `order_` belongs to the current epoch.
  EpochPosition position_;  ///< In `order_`.
};

}  // namespace ddpkit::sampling
