// Tier 1: ATen/core/Tensor.h, through train/metrics.h. The output of a run.
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
  double lr = 0;                                     ///< Learning rate of the last update.
  std::int64_t clips = 0;                            ///< Clips of all ranks since this process started the epoch.
  double seconds = 0;                                ///< Time for these clips.
  double wait_seconds = 0;                           ///< The part of `seconds` that rank 0 waited for clips.
  std::vector<std::int64_t> peak_memory_bytes = {};  ///< Main memory of each process so far. [rank]
  ddpkit::train::ClassificationResult train;
  ddpkit::train::ClassificationResult validation;
  bool is_best = false;

  double clips_per_second() const { return static_cast<double>(clips) / seconds; }
};

/// Formats an epoch as one line of JSON, or as one line of text.
std::string as_json(const Epoch& epoch);
std::string as_line(const Epoch& epoch);

/// Writes the scalars of an epoch with its number of updates as step.
void write_to(ddpkit::train::SummaryWriter& writer, const Epoch& epoch);

/// Formats a table for a terminal: trials of each class in both sets, and the weight of the class. `weights`: [class].
std::string class_table(const TrialSet& set, const TrialSplit& split, const std::vector<double>& weights);

}  // namespace video
