// Tier 1: ATen/core/Tensor.h, through train/metrics.h. What a run says.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ddpkit/train/metrics.h>
#include <ddpkit/train/summary_writer.h>

#include "video/trials.h"

namespace video {

/// A finished epoch.
struct Epoch {
  std::int64_t epoch = 0;  ///< From 1.
  std::int64_t epochs = 0;
  std::int64_t step = 0;  ///< Updates so far.
  int world_size = 1;
  double lr = 0;                                     ///< Of the last update.
  std::int64_t clips = 0;                            ///< Trained on, by all ranks, since the program began the epoch.
  double seconds = 0;                                ///< Of that.
  double wait_seconds = 0;                           ///< Of these, what rank 0 has waited for clips.
  std::vector<std::int64_t> peak_memory_bytes = {};  ///< Of each process so far, in main memory. [rank]
  ddpkit::train::ClassificationResult train;
  ddpkit::train::ClassificationResult validation;
  bool is_best = false;

  double clips_per_second() const { return static_cast<double>(clips) / seconds; }
};

/// One line of JSON, and one for a reader.
std::string as_json(const Epoch& epoch);
std::string as_line(const Epoch& epoch);

/// The scalars of an epoch, by its number of updates.
void write_to(ddpkit::train::SummaryWriter& writer, const Epoch& epoch);

/// Trials of each class in both sets, and the class's weight: a table for a terminal. `weights`: [class].
std::string class_table(const TrialSet& set, const TrialSplit& split, const std::vector<double>& weights);

}  // namespace video
