// Tier 0: the standard library only. The output of a run.
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
  double lr = 0;                      ///< Learning rate of the last update.
  double seconds = 0;                 ///< Seconds of training.
  double median_step_ms = 0;          ///< Of this rank, the complete step: waiting for data, forward, backward, update.
  double wait_seconds = 0;            ///< Seconds that this rank's steps waited for data.
  double exchange_exposed_share = 0;  ///< Share of step time from backward's last gradient to the end of the reduction.
  double first_step_at = 0;           ///< Seconds since 1970, at the end of the run's first step.
  double audio_seconds = 0;           ///< Seconds of audio trained on.
  double train_loss = 0;
  double fullest_over_mean = 1;  ///< From LengthBalance.
  double padding = 0;            ///< From LengthBalance.
  std::optional<double> dev_loss = std::nullopt;
  ErrorCounts dev = {};                              ///< Of the dev set, if dev_loss has a value.
  std::vector<std::int64_t> peak_memory_bytes = {};  ///< [rank]
};

/// Formats an epoch as one line of JSON, or as one line of text.
std::string as_json(const Epoch& epoch);
std::string as_line(const Epoch& epoch);

/// Writes the scalars of an epoch with its number of updates as step.
void write_to(ddpkit::train::SummaryWriter& writer, const Epoch& epoch);

}  // namespace asr
