// The shared code of the samplers.
#pragma once

#include <ATen/core/Generator.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <thread>
#include <vector>

#include <ddpkit/data/resumable_sampler.h>

namespace ddpkit {
namespace sampling {

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
Progress load_progress(torch::serialize::InputArchive& archive, std::size_t count, const char* unit);

/// The position in an epoch up to which the model has trained, as a sampler saves it. A loader may have fetched more.
/// The unit is that of the sampler: samples or batches.
class EpochPosition {
 public:
  /// `begin`: position at which training starts.
  explicit EpochPosition(std::size_t begin = 0) noexcept : dealt_(begin) {}

  std::size_t dealt() const noexcept { return dealt_; }  ///< Position up to which next() has returned.
  /// Adds `count` that next() has returned. They count as trained on until set() is called.
  void deal(std::size_t count) noexcept;
  /// Records that the caller received the whole epoch at once. The position is unknown until next() or set() is called.
  void hand_out() const noexcept;
  /// Sets the position up to which the model has trained. Empty: unknown.
  void set(std::optional<std::size_t> trained) noexcept;

  /// Returns the last known position.
  std::size_t last() const noexcept { return is_set_ ? trained_.value_or(dealt_) : dealt_; }
  /// Returns the position. Throws InvalidArgument if the position is unknown, or if another thread has changed it,
  /// because that thread may be ahead of the training.
  std::size_t trained() const;

 private:
  std::size_t dealt_;
  bool is_set_ = false;
  std::optional<std::size_t> trained_;
  std::thread::id thread_;              ///< Thread of the last next() or set().
  mutable bool is_handed_out_ = false;  ///< Accessed atomically: const functions set it on any thread.
};

/// What training that continues on other ranks needs of a sampler.
class Regroupable {
 public:
  virtual ~Regroupable() = default;
  /// Counts what each rank has trained on in a step: samples or batches.
  virtual void add_trained(std::size_t count) noexcept = 0;
  /// Deals what no rank has trained on to other ranks. As after load(), the epoch continues there.
  virtual void regroup(int world_size, int rank) = 0;
  virtual void save(torch::serialize::OutputArchive& archive) const = 0;
  virtual void load(torch::serialize::InputArchive& archive) = 0;
};

}  // namespace sampling

/// Iterates over the part of one rank.
class ResumableSampler::Impl : public sampling::Regroupable {
 public:
  using Indices = sampling::Indices;

  /// `length`: indices of an epoch's order, before padding. Throws InvalidArgument for an invalid rank.
  Impl(std::size_t length, int world_size, int rank);
  static Impl& of(const ResumableSampler& sampler) noexcept { return *sampler.impl_; }

  std::uint64_t epoch() const noexcept { return progress_.epoch; }
  void set_epoch(std::uint64_t epoch);
  /// Returns this rank's part of the epoch; after load(), the rest of it.
  Indices indices() const;
  /// Restarts the epoch. The first call after load() resumes from the loaded position.
  void reset(std::optional<std::size_t> new_size);
  std::optional<Indices> next(std::size_t batch_size);
  void set_position(std::optional<std::size_t> position);
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  void add_trained(std::size_t samples) noexcept override { trained_ += samples; }
  void regroup(int world_size, int rank) override;
  /// Returns the samples of this rank from index `begin` of the order on.
  std::size_t num_samples(std::size_t begin = 0) const { return share_of(length_ - begin); }

 protected:
  std::size_t length() const noexcept { return length_; }
  std::size_t world_size() const noexcept { return world_size_; }
  std::size_t rank() const noexcept { return rank_; }

 private:
  /// Returns this rank's part of the epoch's order, from index `begin` on: num_samples(begin) indices.
  virtual Indices draw(std::uint64_t epoch, std::size_t begin) const = 0;
  /// Returns the samples per rank, for `left` samples of all ranks.
  virtual std::size_t share_of(std::size_t left) const { return (left + world_size_ - 1) / world_size_; }
  /// Returns the length of the order for a data set of `size` samples. Throws InvalidArgument.
  virtual std::size_t length_for(std::size_t size) const = 0;
  /// Called when an epoch begins for the second time.
  virtual void note_repetition() {}

  void resume();
  void restart_counts() {
    position_ = sampling::EpochPosition();
    trained_ = 0;
  }

  std::size_t length_;
  std::size_t world_size_;
  std::size_t rank_;
  sampling::Progress progress_;  ///< The beginning of `order_`.
  bool was_loaded_ = false;
  bool was_read_ = false;             ///< next() returned samples since set_epoch() or load().
  bool is_drawn_ = false;             ///< `order_` belongs to the current epoch.
  Indices order_;                     ///< This rank's part of the current epoch. [sample]
  sampling::EpochPosition position_;  ///< In `order_`.
  std::size_t trained_ = 0;           ///< See add_trained(). Since the beginning of `order_`.
};

}  // namespace ddpkit
