// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "video/video_reader.h"

namespace video {

struct GenerateOptions {
  int videos = 100;
  int trials = 980;
  int trial_frames = 17;   ///< Length of a trial.
  int least_of_class = 8;  ///< Minimum number of trials per class.
  FrameSize size = {256, 256};
  int keyframe_interval = 30;  ///< Frames.
  std::string codec = {};      ///< See VideoWriterOptions.
  int threads = 0;             ///< 0: one per core.
  std::uint64_t seed = 0;      ///< The same seed gives the same files.
};

/// Returns the number of trials of each class of kBehaviours: its share, by the largest remainders, but at least
/// `least`; the first class compensates. Throws ddpkit::InvalidArgument if there are too few trials. [class]
std::vector<int> trials_of_classes(int trials, int least);

/// Writes a synthetic data set: FOLDER/videos/NNN.mp4, FOLDER/trials.csv and FOLDER/classes.txt. A mouse-like shape
/// moves according to its class (behaviour.h). `folder` appears atomically; it must not exist, or be empty. Draws a
/// progress bar on a terminal. Throws ddpkit::InvalidArgument, or ddpkit::Error with the system's reason.
void generate(const std::filesystem::path& folder, const GenerateOptions& options);

}  // namespace video
