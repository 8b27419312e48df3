// Tier 1: ATen/core/Tensor.h, through train/metrics.h. The output of a run.
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
  int devices = 1;        ///< Over all ranks.
  int world_size = 1;
  double lr = 0;                                     ///< Learning rate of the last update.
  std::int64_t samples = 0;                          ///< Samples of all ranks since this process started the epoch.
  double seconds = 0;                                ///< Time for these samples.
  std::vector<std::int64_t> peak_memory_bytes = {};  ///< Main memory of each process so far. [rank]
  std::vector<std::int64_t> peak_device_bytes = {};  ///< Memory of each GPU so far; empty on the CPU. [device]
  ddpkit::train::ClassificationResult train;
  ddpkit::train::ClassificationResult test;

  double samples_per_second() const { return static_cast<double>(samples) / seconds; }
};

/// Formats an epoch as one line of JSON, or as one line of text.
std::string as_json(const Epoch& epoch);
std::string as_line(const Epoch& epoch);

/// Writes the scalars of an epoch with its number of updates as step.
void write_to(ddpkit::train::SummaryWriter& writer, const Epoch& epoch);

}  // namespace har
