// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "har/recordings.h"

namespace har {

/// One split, ready for a model.
struct Split {
  at::Tensor windows;  ///< [windows, channels, steps] float32
  at::Tensor labels;   ///< [windows] int64, 0 .. classes-1

  std::int64_t size() const { return labels.size(0); }
  Split to(at::Device device) const { return {windows.to(device), labels.to(device)}; }
};

struct Dataset {
  std::string name;
  std::vector<std::string> class_names;  ///< [class]
  Split train;
  Split test;

  std::int64_t channels() const { return train.windows.size(1); }
  std::int64_t steps() const { return train.windows.size(2); }
  std::int64_t classes() const { return static_cast<std::int64_t>(class_names.size()); }
};

/// Reads the folder, whichever of the known layouts it has (UCI-HAR, .ts).
/// Throws ddpkit::InvalidArgument when it has none of them or its files are not right.
RecordingSet read_recordings(const std::filesystem::path& folder);

/// Brings every channel to mean 0 and standard deviation 1 over the training windows (both splits by the same numbers,
/// which know nothing of the test windows). Missing values become 0, the channel's mean; they do not count.
Dataset normalised(const RecordingSet& recordings);

}  // namespace har
