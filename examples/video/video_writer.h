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
  std::string codec = {};      ///< FFmpeg's name of the encoder; empty: libx264 if available, else mpeg4.
};

/// Encodes grey frames into a video file in one thread. The same frames give the same file. The extension of the file
/// name selects the container.
class VideoWriter {
 public:
  /// Throws ddpkit::InvalidArgument for an encoder that FFmpeg lacks or a size that the encoder rejects (4:2:0 encoders
  /// need even numbers), and ddpkit::Error if the file cannot be created.
  VideoWriter(const std::filesystem::path& path, const VideoWriterOptions& options);
  ~VideoWriter();
  VideoWriter(const VideoWriter&) = delete;
  VideoWriter& operator=(const VideoWriter&) = delete;

  /// `pixels` [height, width]. Throws ddpkit::Error.
  void write(const std::uint8_t* pixels);
  /// Completes the file. Throws ddpkit::Error if, for example, the disk is full.
  void finish();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace video
