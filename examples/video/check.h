// Tier 0: the standard library only.
#pragma once

#include "video/clip_loader.h"
#include "video/trials.h"

namespace ddpkit {
class ProcessGroup;
}

namespace video {

/// How far the data is looked at before training.
enum class Check {
  kIndex,   ///< Each video's packets are read, and each trial must lie within it.
  kDecode,  ///< Each trial's frames are decoded as well.
};

struct CheckOptions {
  Check depth = Check::kDecode;
  int num_workers = 1;
};

/// Looks at the videos of all trials, each on one rank, and takes the bad trials out of `set`: on every rank the same
/// ones, so that all take the same number of steps whatever they come upon. What was decoded goes into the loader's
/// cache. Where `faults` stops, every rank throws InvalidArgument for the first bad trial of the file. Collective. Rank
/// 0 draws a progress bar on a terminal.
void check_trials(TrialSet& set, ClipLoader& loader, const CheckOptions& options, const ddpkit::ProcessGroup& group,
                  DataFaults& faults);

/// The first frame of a trial's clip: `draw` (0 <= draw < 1) chooses among all that fit; 0.5 is the middle one.
std::int64_t clip_start(const Trial& trial, std::int64_t clip_frames, double draw);

}  // namespace video
