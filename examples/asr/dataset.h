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

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace asr {

/// Sums over frames of log-mel features before normalisation. The sums are integers, so the same frames in any order
/// give the same bits.
struct FeatureSums {
  explicit FeatureSums(std::int64_t mels);

  void add(const FeatureSums& other);
  /// Returns mean and standard deviation of each band over the frames of all ranks. Collective. [mels]
  std::pair<at::Tensor, at::Tensor> statistics(const ddpkit::ProcessGroup& group) const;
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

  at::Tensor moments;  ///< Sums of the values and of their squares, times 2^20. [2, mels] int64
  std::int64_t frames = 0;
};

/// Utterances as one batch, padded at their ends with zeros.
struct Batch {
  std::vector<std::size_t> utterances = {};  ///< Indices in the dataset. [utterance]
  at::Tensor features = {};                  ///< [batch, frames, mels]
  at::Tensor frames = {};                    ///< Frames per utterance. [batch] int64
  at::Tensor targets = {};                   ///< Labels of all utterances, concatenated. [sum] int64
  at::Tensor target_lengths = {};            ///< [batch] int64
  at::Tensor noise = {};                     ///< For dropout; see Recognizer::forward(). Undefined without dropout.
  at::Tensor weights = {};                   ///< 1, or 0 for padding and unreadable recordings. [batch] float32
  std::int64_t batch_size = 0;               ///< Utterances of the whole batch, over all ranks.
  FeatureSums sums;                          ///< Over the utterances with a weight, before augmentation.

  std::int64_t size() const { return frames.size(0); }
  Batch to(c10::Device device) const;
  /// Returns the rows for which `keep` [batch] is true. If there is none, returns one row of weight 0.
  Batch keeping(const std::vector<bool>& keep) const;
};

/// Random augmentation, drawn again for each utterance in each epoch.
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
  double cache_mb = 512;                                           ///< MiB of features to cache, per process.
  std::function<std::int64_t(std::int64_t frames)> output_frames;  ///< Output frames of the model.
};

/// Utterances with their features. Features are computed on demand and cached up to a limit. Thread-safe.
class Dataset {
 public:
  /// Checks the header and transcript of each file; each rank checks its share. Passes errors to `faults`. Collective.
  /// Throws InvalidArgument on all ranks if `faults` throws on one rank, or if no utterance remains.
  Dataset(std::vector<Utterance> utterances, const DatasetOptions& options, Faults& faults,
          const ddpkit::ProcessGroup& group);

  std::size_t size() const noexcept { return utterances_.size(); }
  const Utterance& operator[](std::size_t index) const { return utterances_[index]; }
  std::vector<std::int64_t> lengths() const;  ///< Frames. [utterance]
  double seconds() const;                     ///< Duration of the dataset.

  /// Returns normalised features [frames, mels]. If the recording is unreadable, notifies `faults` and returns an empty
  /// tensor.
  at::Tensor features(std::size_t index) const { return computed(index).features; }

  /// The last `repeated` utterances get no weight.
  Batch batch(const std::vector<std::size_t>& indices, std::size_t repeated, std::size_t batch_size,
              const std::optional<Augmentation>& augmentation) const;

 private:
  struct Computed {
    at::Tensor features;  ///< Undefined if the recording could not be read, or if features are not cached.
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
