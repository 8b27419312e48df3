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

/// Decodes frames of one video by number, in grey. Not thread-safe. Each reader has a single-threaded decoder.
class VideoReader {
 public:
  /// Opens the file. Throws ddpkit::InvalidArgument "PATH: what is wrong".
  explicit VideoReader(std::shared_ptr<const VideoIndex> index);
  ~VideoReader();
  VideoReader(const VideoReader&) = delete;
  VideoReader& operator=(const VideoReader&) = delete;

  /// Writes frames first .. first + count - 1, scaled to `size`, to `pixels` [count, height, width]: the stored luma,
  /// or swscale's conversion for other formats. Seeks to the keyframe before `first`, unless the decoder is already
  /// between both, and decodes from there. Skips frames that no later frame needs. Throws ddpkit::InvalidArgument
  /// "PATH: ..." if the video has no such frames, cannot be decoded there, or changes its size.
  void read(std::int64_t first, std::int64_t count, FrameSize size, std::uint8_t* pixels);

  const VideoIndex& index() const noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace video
