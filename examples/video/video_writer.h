// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "video/video_reader.h"

namespace video {

struct VideoWriterOptions {
  FrameSize size = {};
  int frames_per_second = 30;
  int keyframe_interval = 30;  ///< Frames from one keyframe to the next, at most.
  std::string codec = {};      ///< FFmpeg's name of the encoder; empty: libx264 where it is there, else mpeg4.
};

/// Encodes grey frames into a video file, in one thread; the same frames give the same file. The container is what the
/// file's name ends in.
class VideoWriter {
 public:
  /// Throws ddpkit::InvalidArgument for an encoder that FFmpeg lacks and a size that it does not take (4:2:0 encoders
  /// want even numbers), ddpkit::Error when the file cannot be made.
  VideoWriter(const std::filesystem::path& path, const VideoWriterOptions& options);
  ~VideoWriter();
  VideoWriter(const VideoWriter&) = delete;
  VideoWriter& operator=(const VideoWriter&) = delete;

  /// `pixels` [height, width]. Throws ddpkit::Error.
  void write(const std::uint8_t* pixels);
  /// The file is complete only after this. Throws ddpkit::Error when the disk is full or the like.
  void finish();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace video
