// Tier 0: the standard library only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace ddpkit {

/// Names and meaning are those of Python's torch.utils.data.DataLoader.
struct PrefetcherOptions {
  /// Threads that make batches ahead of the caller. 0: next() makes the batches.
  int num_workers = 0;
  /// Batches that each worker may be ahead. Limits the memory use.
  int prefetch_factor = 2;
};

/// Statistics of a Prefetcher. If the workers are faster than the model, `wait_seconds` is near 0.
struct PrefetcherStats {
  std::int64_t batches = 0;  ///< Batches that next() has returned.
  double wait_seconds = 0;   ///< Time that next() waited for a batch. Without workers: time to make the batches.
  double make_seconds = 0;   ///< Time that all workers together have spent on making batches.
};

/// The part of Prefetcher that does not depend on the batch's type.
class PrefetcherBase {
 public:
  /// Returns the statistics so far. Thread-safe.
  PrefetcherStats stats() const;

 protected:
  using Made = std::shared_ptr<void>;  ///< A batch; null at the end.
  /// See Prefetcher.
  PrefetcherBase(std::int64_t count, std::function<Made(std::int64_t)> make, const PrefetcherOptions& options);
  ~PrefetcherBase();
  PrefetcherBase(PrefetcherBase&&) noexcept;
  PrefetcherBase& operator=(PrefetcherBase&&) noexcept;
  Made take();  ///< Returns the next batch. Throws the error of `make`.
  /// Throws InvalidArgument for a batch_size of 0.
  static std::int64_t batches_of(std::size_t samples, std::size_t batch_size);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Makes batches in background threads, ahead of the training loop, and returns them in order. The sequence does not
/// depend on the number of workers.
///
///     ddpkit::Prefetcher<Batch> batches(sampler, 32, [&](const std::vector<std::size_t>& indices) { return
///     load(indices); },
///                                       {.num_workers = 2});
///     while (auto batch = batches.next()) train(*batch);
///
/// Not collective. Only one thread may call next(). The destructor waits for the batches that are being made.
template <class Batch>
class Prefetcher : public PrefetcherBase {
 public:
  /// Calls `make(index)` once for each index in 0 .. count-1, from several threads at once if there are several
  /// workers. Each worker thread uses one thread for its operators. Throws InvalidArgument for negative numbers or a
  /// prefetch_factor of 0.
  Prefetcher(std::int64_t count, std::function<Batch(std::int64_t index)> make, const PrefetcherOptions& options = {})
      : PrefetcherBase(
            count,
            [make = std::move(make)](std::int64_t index) -> Made { return std::make_shared<Batch>(make(index)); },
            options) {}

  /// Iterates over the rest of the epoch of `sampler` (a DistributedSampler or DistributedWeightedSampler),
  /// `batch_size` indices at a time. The sampler's position, which checkpoints save, counts the batches that next() has
  /// returned.
  template <class Sampler>
  Prefetcher(Sampler sampler, std::size_t batch_size,
             std::function<Batch(const std::vector<std::size_t>& indices)> make, const PrefetcherOptions& options = {})
      : Prefetcher(sampler.indices(), sampler, batch_size, std::move(make), options) {}

  /// Returns the next batch in order, or an empty optional after the last. Throws the error that `make` threw for that
  /// batch; the following call returns the batch after it.
  std::optional<Batch> next() {
    Made made;
    try {
      made = take();
    } catch (...) {
      if (note_taken_) note_taken_();
      throw;
    }
    if (!made) return std::nullopt;
    if (note_taken_) note_taken_();
    return std::move(*static_cast<Batch*>(made.get()));
  }

 private:
  template <class Sampler>
  Prefetcher(const std::vector<std::size_t>& indices, Sampler sampler, std::size_t batch_size,
             std::function<Batch(const std::vector<std::size_t>&)> make, const PrefetcherOptions& options)
      : Prefetcher(
            batches_of(indices.size(), batch_size),
            [indices, batch_size, make = std::move(make)](std::int64_t index) {
              const auto from = indices.begin() + static_cast<std::ptrdiff_t>(batch_size) * index;
              const auto left = static_cast<std::size_t>(indices.end() - from);
              return make({from, from + static_cast<std::ptrdiff_t>(std::min(batch_size, left))});
            },
            options) {
    sampler.set_position(0);
    note_taken_ = [sampler, batch_size, size = indices.size(), taken = std::size_t{0}]() mutable {
      taken = std::min(taken + batch_size, size);
      sampler.set_position(taken);
    };
  }

  std::function<void()> note_taken_;
};

}  // namespace ddpkit
