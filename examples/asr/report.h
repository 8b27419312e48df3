// Tier 0: the standard library only. What a run says.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "asr/faults.h"
#include "asr/score.h"

namespace ddpkit::train {
class SummaryWriter;
}

namespace asr {

/// A finished epoch.
struct Epoch {
  std::int64_t epoch = 0;  ///< From 1.
  std::int64_t epochs = 0;
  std::int64_t step = 0;  ///< Updates so far.
  int world_size = 1;
  double lr = 0;                      ///< Of the last update.
  double seconds = 0;                 ///< Of training.
  double median_step_ms = 0;          ///< Of this rank, all of it: waiting for data, forward, backward, update.
  double wait_seconds = 0;            ///< That this rank's steps have waited for data.
  double exchange_exposed_share = 0;  ///< Of the steps' time: from a backward's last gradient to the last one reduced.
  double first_step_at = 0;           ///< Seconds since 1970; when the run's first step was done.
  double audio_seconds = 0;           ///< That was trained on.
  double train_loss = 0;
  double fullest_over_mean = 1;  ///< LengthBalance's.
  double padding = 0;            ///< LengthBalance's.
  std::optional<double> dev_loss = std::nullopt;
  ErrorCounts dev = {};                              ///< Of the dev set, where dev_loss has a value.
  std::vector<std::int64_t> peak_memory_bytes = {};  ///< [rank]
};

/// One line of JSON, and one for a reader.
std::string as_json(const Epoch& epoch);
std::string as_line(const Epoch& epoch);

/// The scalars of an epoch, by its number of updates.
void write_to(ddpkit::train::SummaryWriter& writer, const Epoch& epoch);

}  // namespace asr
