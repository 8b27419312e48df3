// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

namespace video {

/// Where the frames of a video file are, found by reading all its packets: what the file's header says of its length
/// is not believed.
struct VideoIndex {
  std::filesystem::path path;
  int stream = 0;  ///< Number of the video stream in the file.
  int width = 0;
  int height = 0;
  /// Presentation times in the stream's time base, ascending: frame n is shown at times[n]. [frame]
  std::vector<std::int64_t> times;
  std::vector<std::int64_t> keyframes;  ///< Numbers of the frames at which decoding can begin, ascending.
  /// False where packets carry no presentation times, or the same one twice: then the frames are counted from the
  /// file's beginning, each time.
  bool seekable = true;

  std::int64_t frames() const noexcept { return static_cast<std::int64_t>(times.size()); }
};

/// Throws ddpkit::InvalidArgument "PATH: what is wrong" when FFmpeg's libraries cannot read the file, or it holds no
/// video with a width and a height up to 16384.
std::shared_ptr<const VideoIndex> index_video(const std::filesystem::path& path);

}  // namespace video
