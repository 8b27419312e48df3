// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

namespace ddpkit {

/// Names and meaning of Python's torch.utils.data.DataLoader.
struct PrefetcherOptions {
  /// Threads that make batches ahead of the caller. 0: next() makes them itself.
  int num_workers = 0;
  /// Batches that each worker may be ahead: what bounds the memory.
  int prefetch_factor = 2;
};

/// What a Prefetcher has done so far. A loader that keeps ahead of the model has a `wait_seconds` near 0.
struct PrefetcherStats {
  std::int64_t batches = 0;  ///< Handed out.
  double wait_seconds = 0;   ///< That next() has waited for a batch; without workers, that it took to make them.
  double make_seconds = 0;   ///< That all workers together have spent on making batches.
};

/// The part of Prefetcher that does not depend on the batch's type.
class PrefetcherBase {
 public:
  /// So far. Any thread.
  PrefetcherStats stats() const;

 protected:
  using Made = std::shared_ptr<void>;
  PrefetcherBase(std::int64_t count, std::function<Made(std::int64_t)> make, const PrefetcherOptions& options);
  ~PrefetcherBase();
  PrefetcherBase(PrefetcherBase&&) noexcept;
  PrefetcherBase& operator=(PrefetcherBase&&) noexcept;
  Made take();  ///< Null at the end.

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Makes batches in threads of its own, ahead of the training loop, and hands them out in order: the sequence is the
/// same whatever the number of workers.
///
///     ddpkit::Prefetcher<Batch> batches(count, [&](std::int64_t index) { return load(index); }, {.num_workers = 2});
///     while (auto batch = batches.next()) train(*batch);
///
/// Not collective. One thread calls next(). Destruction waits for the batches that are being made.
template <class Batch>
class Prefetcher : public PrefetcherBase {
 public:
  /// `make(index)` is called once for each index in 0 .. count-1, with workers in several threads at once, each of
  /// which has one thread for its operators. Throws InvalidArgument for negative numbers or a prefetch_factor of 0.
  Prefetcher(std::int64_t count, std::function<Batch(std::int64_t index)> make, const PrefetcherOptions& options = {})
      : PrefetcherBase(
            count,
            [make = std::move(make)](std::int64_t index) -> Made { return std::make_shared<Batch>(make(index)); },
            options) {}

  /// The next batch, in order; empty after the last. Throws what `make` threw for it; the one after it comes next.
  std::optional<Batch> next() {
    const Made made = take();
    if (!made) return std::nullopt;
    return std::move(*static_cast<Batch*>(made.get()));
  }
};

}  // namespace ddpkit
