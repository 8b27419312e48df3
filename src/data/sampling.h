// What all samplers do alike.
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

/// What Python's samplers shuffle by: a generator of their own, seeded by seed + epoch.
at::Generator generator_of(std::uint64_t seed, std::uint64_t epoch);
/// 0 .. size-1, shuffled by torch.randperm.
Indices shuffled(std::size_t size, const at::Generator& generator);

/// Where the ranks together stand in an epoch, so that any number of ranks can go on from there.
struct Progress {
  std::uint64_t epoch = 0;
  std::size_t taken = 0;  ///< Of the epoch's order, which all ranks share: samples, or batches.
};

void save_progress(torch::serialize::OutputArchive& archive, const Progress& progress);
/// Throws InvalidArgument when more than the `count` of `unit` ("sample", "batch") that an epoch has were taken.
void check_progress(const Progress& saved, std::size_t count, const char* unit);
/// Throws as check_progress().
Progress load_progress(torch::serialize::InputArchive& archive, std::size_t count, const char* unit);

/// One rank's way through epochs whose order all ranks share: rank r takes every world_size-th of it.
class Walk {
 public:
  /// This rank's part of the epoch's order from its index `begin` on.
  using Draw = std::function<Indices(std::uint64_t epoch, std::size_t begin)>;

  /// An epoch's order has `length` indices before padding. Throws InvalidArgument where there is no such rank.
  Walk(std::size_t length, int world_size, int rank);

  std::size_t world_size() const noexcept { return world_size_; }
  std::size_t rank() const noexcept { return rank_; }
  std::uint64_t epoch() const noexcept { return progress_.epoch; }
  /// Throws InvalidArgument, and changes nothing, after load() of a place beyond `length`.
  void set_length(std::size_t length);
  void set_epoch(std::uint64_t epoch);

  /// This rank's part of the epoch; what is left of it after load().
  Indices indices(const Draw& draw) const {
    position_.hand_out();
    return draw(progress_.epoch, progress_.taken);
  }
  /// Starts the epoch over; after load() goes on where it stood, once.
  void reset(const Draw& draw);
  /// Up to `batch_size` indices; nothing at the end. The first ones after set_epoch() are the new epoch's.
  std::optional<Indices> next(std::size_t batch_size, const Draw& draw);
  /// Of the epoch's order, how much was taken before this walk began.
  std::size_t taken() const noexcept { return progress_.taken; }
  /// The model has trained on `position` of the `left` indices that this rank has left. Throws InvalidArgument beyond
  /// them.
  void set_position(std::optional<std::size_t> position, std::size_t left);

  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive, const Draw& draw);

 private:
  std::size_t length_;
  std::size_t world_size_;
  std::size_t rank_;
  Progress progress_;  ///< Where `order_` begins.
  bool was_loaded_ = false;
  Indices order_;           ///< This rank's, for the epoch under way. [sample]
  bool is_drawn_ = false;   ///< `order_` is of the current epoch.
  EpochPosition position_;  ///< In `order_`.
};

}  // namespace ddpkit::sampling
