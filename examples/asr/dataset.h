// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <ddpkit/comm/process_group.h>

#include "asr/alphabet.h"
#include "asr/corpus.h"
#include "asr/faults.h"
#include "asr/features.h"

namespace asr {

/// Sums over frames of log-mel features before normalisation. They are whole numbers, so that the same frames give the
/// same bits in whatever order they come.
struct FeatureSums {
  explicit FeatureSums(std::int64_t mels);

  void add(const FeatureSums& other);
  /// Mean and standard deviation of each band over the frames of all ranks. Collective. [mels]
  std::pair<at::Tensor, at::Tensor> statistics(const ddpkit::ProcessGroup& group) const;

  at::Tensor moments;  ///< Of the values, and of their squares, times 2^20. [2, mels] int64
  std::int64_t frames = 0;
};

/// Utterances put together, padded at their ends with zeros.
struct Batch {
  std::vector<std::size_t> utterances = {};  ///< Their numbers in the dataset. [utterance]
  at::Tensor features = {};                  ///< [batch, frames, mels]
  at::Tensor frames = {};                    ///< Of each utterance. [batch] int64
  at::Tensor targets = {};                   ///< Labels, one utterance's after the other. [sum] int64
  at::Tensor target_lengths = {};            ///< [batch] int64
  at::Tensor noise = {};                     ///< For dropout; see Recognizer::forward(). Undefined where none is drawn.
  at::Tensor weights = {};                   ///< 1, or 0 for padding and for what could not be read. [batch] float32
  std::int64_t batch_size = 0;               ///< Utterances of the whole batch, over all ranks.
  FeatureSums sums;                          ///< Of the utterances with a weight, before augmentation.

  std::int64_t size() const { return frames.size(0); }
  Batch to(c10::Device device) const;
  /// Without the rows of which `keep` [batch] is false; one row of weight 0 where none is left.
  Batch keeping(const std::vector<bool>& keep) const;
};

/// What is drawn anew for each utterance in each epoch.
struct Augmentation {
  std::optional<SpecAugmentOptions> spec_augment;
  std::int64_t noise_layers = 0;  ///< 0: no noise.
  std::int64_t noise_width = 0;
  std::uint64_t seed = 0;
  std::int64_t epoch = 0;
};

struct DatasetOptions {
  std::string name = {};  ///< For messages.
  FeatureOptions features = {};
  double cache_mb = 512;                                           ///< MiB of features to keep, of this process.
  std::function<std::int64_t(std::int64_t frames)> output_frames;  ///< Of the model.
};

/// Utterances with their features, which are computed when they are asked for and kept while there is room. Safe to
/// call from several threads.
class Dataset {
 public:
  /// Looks at every file's header and transcript, each rank at its share, and hands what is wrong to `faults`.
  /// Collective. Throws InvalidArgument on all ranks where `faults` throws on one, or where nothing is left.
  Dataset(std::vector<Utterance> utterances, const DatasetOptions& options, Faults& faults,
          const ddpkit::ProcessGroup& group);

  std::size_t size() const noexcept { return utterances_.size(); }
  const Utterance& operator[](std::size_t index) const { return utterances_[index]; }
  std::vector<std::int64_t> lengths() const;  ///< Frames. [utterance]
  double seconds() const;                     ///< Of all of it.

  /// Normalised features [frames, mels]; empty where the recording turns out to be unreadable, which `faults` is told.
  at::Tensor features(std::size_t index) const { return computed(index).features; }

  /// The last `repeated` utterances get no weight.
  Batch batch(const std::vector<std::size_t>& indices, std::size_t repeated, std::size_t batch_size,
              const std::optional<Augmentation>& augmentation) const;

 private:
  struct Computed {
    at::Tensor features;  ///< Undefined where the recording could not be read, or nothing is kept.
    FeatureSums sums;
  };

  void scan(const DatasetOptions& options, const ddpkit::ProcessGroup& group);
  Computed computed(std::size_t index) const;

  std::vector<Utterance> utterances_;
  LogMel log_mel_;
  Alphabet alphabet_;
  Faults& faults_;
  std::size_t cache_bytes_;
  mutable std::mutex mutex_;
  mutable std::vector<Computed> cache_;  ///< [utterance]
  mutable std::size_t cached_bytes_ = 0;
};

}  // namespace asr
