// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

namespace video {

/// The frames of a video file, found by reading all its packets. The length in the file's header is not trusted.
struct VideoIndex {
  std::filesystem::path path;
  int stream = 0;  ///< Number of the video stream in the file.
  int width = 0;
  int height = 0;
  /// Presentation times in the stream's time base, ascending: frame n is shown at times[n]. [frame]
  std::vector<std::int64_t> times;
  std::vector<std::int64_t> keyframes;  ///< Indices of the frames at which decoding can begin, ascending.
  /// False if packets have no presentation times or repeated ones. Then frames are counted from the beginning of the
  /// file.
  bool seekable = true;

  std::int64_t frames() const noexcept { return static_cast<std::int64_t>(times.size()); }
};

/// Throws ddpkit::InvalidArgument "PATH: what is wrong" if FFmpeg cannot read the file, or if the file holds no video
/// with a width and a height up to 16384.
std::shared_ptr<const VideoIndex> index_video(const std::filesystem::path& path);

}  // namespace video
