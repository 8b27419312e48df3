// Tier 1: ATen/core/Tensor.h, through train/metrics.h.
#pragma once

#include <cstdint>

#include <ddpkit/train/metrics.h>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace video {

/// The epoch with the highest macro F1 so far. Stored in the checkpoint, so that a resumed run compares with it.
class Best {
 public:
  /// Returns whether this epoch is better than all before, and keeps it if so. If epochs are equal, the first remains.
  bool update(std::int64_t epoch, const ddpkit::train::ClassificationResult& result);

  std::int64_t epoch() const noexcept { return epoch_; }  ///< From 1; 0 before the first.
  const ddpkit::train::ClassificationResult& result() const noexcept { return result_; }

  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  std::int64_t epoch_ = 0;
  ddpkit::train::ClassificationResult result_;
};

}  // namespace video
