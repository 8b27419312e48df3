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
  int least_of_class = 8;  ///< Trials that even the rarest class gets.
  FrameSize size = {256, 256};
  int keyframe_interval = 30;  ///< Frames.
  std::string codec = {};      ///< See VideoWriterOptions.
  int threads = 0;             ///< 0: one a core.
  std::uint64_t seed = 0;      ///< Same seed, same files.
};

/// Trials of each class of kBehaviours: its share, by the largest remainders, but no fewer than `least`; the first
/// class makes up for it. Throws ddpkit::InvalidArgument when there are too few trials for that. [class]
std::vector<int> trials_of_classes(int trials, int least);

/// Writes a made-up data set: FOLDER/videos/NNN.mp4, FOLDER/trials.csv and FOLDER/classes.txt, in which a mouse-like
/// shape moves as its class tells (behaviour.h). `folder` appears whole or not at all; it must not exist, or be empty.
/// Draws a progress bar on a terminal. Throws ddpkit::InvalidArgument, or ddpkit::Error with the system's reason.
void generate(const std::filesystem::path& folder, const GenerateOptions& options);

}  // namespace video
