// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <ddpkit/parallel/pytree.h>

#include "har/recordings.h"

namespace har {

/// Windows and their labels: a split of the data set, or a part of it.
struct Split {
  at::Tensor windows;  ///< [windows, channels, steps] float32
  at::Tensor labels;   ///< [windows] int64, 0 .. classes-1

  std::int64_t size() const { return labels.size(0); }
  Split to(at::Device device) const { return {windows.to(device), labels.to(device)}; }
  /// `indices`: on the device of the split.
  Split rows(const at::Tensor& indices) const {
    return {windows.index_select(0, indices), labels.index_select(0, indices)};
  }
  Split slice(std::int64_t begin, std::int64_t end) const {
    return {windows.slice(0, begin, end), labels.slice(0, begin, end)};
  }
};

inline Split map_tensors(const Split& split, const ddpkit::TensorMap& map) {
  return {.windows = map(split.windows), .labels = map(split.labels)};
}

struct Dataset {
  std::string name;
  std::vector<std::string> class_names;  ///< [class]
  Split train;
  Split test;

  std::int64_t channels() const { return train.windows.size(1); }
  std::int64_t steps() const { return train.windows.size(2); }
  std::int64_t classes() const { return static_cast<std::int64_t>(class_names.size()); }
};

/// Reads a folder in one of the known layouts (UCI-HAR, .ts).
/// Throws ddpkit::InvalidArgument if the layout is unknown or a file is invalid.
RecordingSet read_recordings(const std::filesystem::path& folder);

/// Normalises each channel to mean 0 and standard deviation 1 over the training windows. The test windows use the same
/// numbers. Missing values become 0, the channel's mean; the statistics ignore them.
Dataset normalised(const RecordingSet& recordings);

}  // namespace har
