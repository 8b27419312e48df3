// Tier 0: the standard library only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace har {

/// Windows of one split, as read. NaN is a missing value.
struct Recordings {
  std::size_t channels = 0;
  std::size_t steps = 0;
  std::vector<float> values;         ///< [window, channel, step], step varies fastest.
  std::vector<std::int64_t> labels;  ///< Class of each window, an index into class_names. [window]
  std::vector<int> subjects;         ///< Person who wore the sensor; empty if the data does not specify it. [window]

  std::size_t windows() const noexcept { return labels.size(); }
};

/// A data set as read from a folder.
struct RecordingSet {
  std::string name;
  std::vector<std::string> class_names;  ///< [class]
  Recordings train;
  Recordings test;
};

}  // namespace har
