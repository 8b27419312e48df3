// Tier 2: torch/data/dataloader/stateless.h. The samplers include this header. For a ddpkit sampler,
// torch::data::make_data_loader() then creates the loader defined here, which reports the delivered batches.
#pragma once

#include <torch/data/dataloader/stateless.h>

#include <concepts>
#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include <ddpkit/data/resumable_sampler.h>

namespace ddpkit {

/// A sampler for a data loader whose workers request batches ahead of the training. Its position counts the batches
/// that the loader has delivered. Copies share their state.
class PrefetchingSampler {
 public:
  using BatchRequestType = ResumableSampler::BatchRequestType;  ///< Indices of one batch.

  /// The sampler sets the position of `sampler`.
  explicit PrefetchingSampler(ResumableSampler sampler) : state_(std::make_shared<State>(State{std::move(sampler)})) {}

  /// Starts an epoch.
  void reset() {
    state_->sampler.reset();
    state_->sampler.set_position(std::nullopt);
    state_->sizes.clear();
    state_->delivered = 0;
  }
  /// Returns the indices of the next batch; empty at the end of the epoch. The batch counts as undelivered.
  std::optional<BatchRequestType> next(std::size_t batch_size) {
    auto batch = state_->sampler.next(batch_size);
    if (batch) state_->sizes.push_back(batch->size());
    return batch;
  }
  /// Marks the next `batches` undelivered batches as delivered.
  void deliver(std::size_t batches) {
    for (; batches > 0 && !state_->sizes.empty(); --batches) {
      state_->delivered += state_->sizes.front();
      state_->sizes.pop_front();
    }
    state_->sampler.set_position(state_->delivered);
  }

 private:
  struct State {
    ResumableSampler sampler;
    std::deque<std::size_t> sizes = {};  ///< Sizes of the undelivered batches.
    std::size_t delivered = 0;           ///< In samples.
  };
  std::shared_ptr<State> state_;
};

}  // namespace ddpkit

namespace torch::data {

/// LibTorch's loader over a ddpkit sampler. The position of the sampler counts the batches that the training loop has
/// received, as in torchdata's StatefulDataLoader. Workers may have fetched more.
template <class Dataset, std::derived_from<ddpkit::ResumableSampler> Sampler>
class StatelessDataLoader<Dataset, Sampler> : public StatelessDataLoader<Dataset, ddpkit::PrefetchingSampler> {
  using super = StatelessDataLoader<Dataset, ddpkit::PrefetchingSampler>;

 public:
  using typename super::BatchType;

  /// Called by make_data_loader().
  StatelessDataLoader(Dataset dataset, Sampler sampler, DataLoaderOptions options)
      : StatelessDataLoader(std::move(dataset), ddpkit::PrefetchingSampler(std::move(sampler)), options) {}

  /// Starts an epoch and returns an iterator over its batches.
  Iterator<BatchType> begin() {
    (void)super::begin();
    undelivered_ = 0;
    if (is_ordered()) sampler_.deliver(0);
    return Iterator<BatchType>(
        std::make_unique<detail::ValidIterator<BatchType>>([this] { return next_and_report(); }));
  }

 private:
  StatelessDataLoader(Dataset dataset, ddpkit::PrefetchingSampler sampler, const DataLoaderOptions& options)
      : super(std::move(dataset), sampler, options), sampler_(std::move(sampler)) {}

  bool is_ordered() const { return this->options_.enforce_ordering || this->options_.workers <= 1; }

  std::optional<BatchType> next_and_report() {
    std::optional<BatchType> batch;
    try {
      batch = this->next();
    } catch (const WorkerException&) {
      note_delivery();  // The loader does not deliver this batch again.
      throw;
    } catch (...) {
      if (this->options_.workers == 0) note_delivery();
      throw;
    }
    if (batch)
      note_delivery();
    else
      sampler_.deliver(std::exchange(undelivered_, 0));
    return batch;
  }

  void note_delivery() {
    if (is_ordered())
      sampler_.deliver(1);
    else
      ++undelivered_;
  }

  ddpkit::PrefetchingSampler sampler_;
  std::size_t undelivered_ = 0;  ///< Batches that came in an unknown order; reported when the epoch is complete.
};

}  // namespace torch::data
