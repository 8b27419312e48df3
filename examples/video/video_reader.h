// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <memory>

#include "video/video_index.h"

namespace video {

/// Width and height in pixels.
struct FrameSize {
  int width = 0;
  int height = 0;

  std::int64_t pixels() const noexcept { return std::int64_t{width} * height; }
  bool operator==(const FrameSize&) const = default;
};

/// Decodes frames of one video by their numbers, in grey. One thread at a time; each reader is a decoder of one thread.
class VideoReader {
 public:
  /// Opens the file. Throws ddpkit::InvalidArgument "PATH: what is wrong".
  explicit VideoReader(std::shared_ptr<const VideoIndex> index);
  ~VideoReader();
  VideoReader(const VideoReader&) = delete;
  VideoReader& operator=(const VideoReader&) = delete;

  /// Writes frames first .. first + count - 1, scaled to `size`, to `pixels` [count, height, width]: the luma as it is
  /// stored, or, of formats that have none, what swscale makes of it. Goes to the keyframe before `first`, unless it
  /// stands between that and `first` already, and decodes from there on; what no later frame needs is left out.
  /// Throws ddpkit::InvalidArgument "PATH: ..." when the video has no such frames, cannot be decoded there, or changes
  /// its size.
  void read(std::int64_t first, std::int64_t count, FrameSize size, std::uint8_t* pixels);

  const VideoIndex& index() const noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace video
