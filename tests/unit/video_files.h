// Test videos whose frames encode their number.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "support/catch.h"
#include "support/folder.h"
#include "video/video_reader.h"
#include "video/video_writer.h"

namespace video::testing {

using ddpkit::testing::Folder;
using ddpkit::testing::read_file;
using ddpkit::testing::write_file;

/// Returns frame `number`: eight black or white bars for its bits. [height, width]
inline std::vector<std::uint8_t> numbered_frame(std::int64_t number, FrameSize size) {
  std::vector<std::uint8_t> pixels(static_cast<std::size_t>(size.pixels()));
  for (int row = 0; row < size.height; ++row) {
    for (int column = 0; column < size.width; ++column)
      pixels[static_cast<std::size_t>(row * size.width + column)] =
          ((number >> (8 * column / size.width)) & 1) != 0 ? 220 : 30;
  }
  return pixels;
}

/// Returns the number of a frame after decoding and scaling.
inline std::int64_t number_in(const std::uint8_t* pixels, FrameSize size) {
  std::int64_t number = 0;
  for (int bit = 0; bit < 8; ++bit) {
    const int column = (2 * bit + 1) * size.width / 16;
    if (pixels[size.height / 2 * size.width + column] > 125) number |= 1 << bit;
  }
  return number;
}

inline void write_numbered(const std::filesystem::path& path, int frames, const VideoWriterOptions& options) {
  VideoWriter writer(path, options);
  for (int i = 0; i < frames; ++i) writer.write(numbered_frame(i, options.size).data());
  writer.finish();
}

/// Returns the numbers of frames first .. first + count - 1.
inline std::vector<std::int64_t> read_numbers(VideoReader& reader, std::int64_t first, std::int64_t count,
                                              FrameSize size) {
  std::vector<std::uint8_t> pixels(static_cast<std::size_t>(count * size.pixels()));
  reader.read(first, count, size, pixels.data());
  std::vector<std::int64_t> numbers;
  for (std::int64_t i = 0; i < count; ++i) numbers.push_back(number_in(pixels.data() + i * size.pixels(), size));
  return numbers;
}

}  // namespace video::testing
