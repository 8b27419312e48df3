// Tier 0: the standard library only.
#pragma once

#include "video/clip_loader.h"
#include "video/trials.h"

namespace ddpkit {
class ProcessGroup;
}

namespace video {

/// The depth of the data check before training.
enum class Check {
  kIndex,   ///< Reads each video's packets; each trial must lie within its video.
  kDecode,  ///< Also decodes each trial's frames.
};

struct CheckOptions {
  Check depth = Check::kDecode;
  int num_workers = 1;
};

/// Checks the videos of all trials, each on one rank, and removes the bad trials from `set`. All ranks remove the same
/// trials, so that they take the same number of steps. Decoded clips go into the loader's cache. If `faults` stops,
/// each rank throws InvalidArgument for the first bad trial of the file. Collective. Rank 0 draws a progress bar on a
/// terminal.
void check_trials(TrialSet& set, ClipLoader& loader, const CheckOptions& options, const ddpkit::ProcessGroup& group,
                  DataFaults& faults);

/// Returns the first frame of a trial's clip. `draw` (0 <= draw < 1) selects among all possible frames; 0.5 is the
/// middle.
std::int64_t clip_start(const Trial& trial, std::int64_t clip_frames, double draw);

}  // namespace video
