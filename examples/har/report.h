// Tier 1: ATen/core/Tensor.h, through train/metrics.h. What a run says.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <ddpkit/train/metrics.h>
#include <ddpkit/train/summary_writer.h>

namespace har {

/// A finished epoch.
struct Epoch {
  std::int64_t epoch = 0;  ///< From 1.
  std::int64_t epochs = 0;
  std::int64_t step = 0;  ///< Updates so far.
  int devices = 1;        ///< Of all ranks.
  int world_size = 1;
  double lr = 0;                                     ///< Of the last update.
  std::int64_t samples = 0;                          ///< Trained on, by all ranks, since the program began the epoch.
  double seconds = 0;                                ///< Of that.
  std::vector<std::int64_t> peak_memory_bytes = {};  ///< Of each process so far, in main memory. [rank]
  std::vector<std::int64_t> peak_device_bytes = {};  ///< Of each GPU so far; empty on the CPU. [device]
  ddpkit::train::ClassificationResult train;
  ddpkit::train::ClassificationResult test;

  double samples_per_second() const { return static_cast<double>(samples) / seconds; }
};

/// One line of JSON, and one for a reader.
std::string as_json(const Epoch& epoch);
std::string as_line(const Epoch& epoch);

/// The scalars of an epoch, by its number of updates.
void write_to(ddpkit::train::SummaryWriter& writer, const Epoch& epoch);

}  // namespace har
