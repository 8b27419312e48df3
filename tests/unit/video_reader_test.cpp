#include <numeric>

#include <ddpkit/error.h>
#include <ddpkit/train/random.h>

#include "video/libav.h"
#include "video_files.h"

using namespace video;
using namespace video::testing;

namespace {

constexpr int kFrames = 150;

bool has_encoder(const char* name) { return avcodec_find_encoder_by_name(name) != nullptr; }

struct Kind {
  const char* codec;
  const char* file;
};

}  // namespace

TEST_CASE("every clip begins with the frame that was asked for", "[video]") {
  for (const Kind& kind :
       {Kind{"libx264", "a.mp4"}, Kind{"libx264", "a.mkv"}, Kind{"libx264", "a.ts"}, Kind{"mpeg4", "a.mp4"},
        Kind{"mpeg4", "a.avi"}, Kind{"mpeg2video", "a.ts"}, Kind{"ffv1", "a.mkv"}, Kind{"mjpeg", "a.avi"}}) {
    if (!has_encoder(kind.codec)) continue;
    CAPTURE(kind.codec, kind.file);
    const Folder folder;
    const FrameSize size{64, 48};
    write_numbered(folder / kind.file, kFrames, {.size = size, .keyframe_interval = 12, .codec = kind.codec});
    const auto index = index_video(folder / kind.file);
    REQUIRE(index->frames() == kFrames);
    CHECK(index->width == 64);
    CHECK(index->height == 48);
    VideoReader reader(index);
    ddpkit::train::Random random(1);
    for (int clip = 0; clip < 25; ++clip) {
      // Also directly after the last clip, across keyframes, and at the beginning and end.
      const std::int64_t count = 1 + random.below(17);
      const std::int64_t first = clip == 0 ? 0 : clip == 1 ? kFrames - count : random.below(kFrames - count + 1);
      std::vector<std::int64_t> expected(static_cast<std::size_t>(count));
      std::iota(expected.begin(), expected.end(), first);
      const FrameSize to = clip % 3 == 0 ? size : clip % 3 == 1 ? FrameSize{32, 32} : FrameSize{100, 50};
      CAPTURE(first, count);
      CHECK(read_numbers(reader, first, count, to) == expected);
    }
    for (std::int64_t first = 0; first + 5 <= kFrames; first += 5)
      CHECK(read_numbers(reader, first, 1, size)[0] == first);
  }
}

TEST_CASE("a video with odd dimensions is scaled like any other", "[video]") {
  const Folder folder;
  write_numbered(folder / "odd.mkv", 20, {.size = {67, 45}, .codec = "ffv1"});
  VideoReader reader(index_video(folder / "odd.mkv"));
  CHECK(reader.index().width == 67);
  for (const FrameSize to : {FrameSize{67, 45}, FrameSize{64, 64}, FrameSize{33, 17}})
    CHECK(read_numbers(reader, 3, 5, to) == std::vector<std::int64_t>{3, 4, 5, 6, 7});
}

TEST_CASE("pixels at the file's own size are its luma", "[video]") {
  const Folder folder;
  const FrameSize size{48, 32};
  VideoWriter writer(folder / "a.mkv", {.size = size, .codec = "ffv1"});  // Without loss.
  std::vector<std::uint8_t> pixels(static_cast<std::size_t>(size.pixels())), read(pixels.size());
  for (std::size_t i = 0; i < pixels.size(); ++i) pixels[i] = static_cast<std::uint8_t>(i * 7 % 256);
  writer.write(pixels.data());
  writer.finish();
  VideoReader reader(index_video(folder / "a.mkv"));
  reader.read(0, 1, size, read.data());
  CHECK(read == pixels);
}

TEST_CASE("what is no video, is cut off, or changes its size is refused by name", "[video]") {
  const Folder folder;
  const FrameSize size{64, 64};
  const auto message_of = [&](const std::string& name) -> std::string {
    try {
      VideoReader reader(index_video(folder / name));
      std::vector<std::uint8_t> pixels(static_cast<std::size_t>(size.pixels()));
      for (std::int64_t i = 0; i < std::max<std::int64_t>(60, reader.index().frames()); ++i)
        reader.read(i, 1, size, pixels.data());
    } catch (const ddpkit::InvalidArgument& error) {
      const std::string message = error.what();
      CHECK_THAT(message, ContainsSubstring((folder / name).string()));
      return message;
    }
    return "";
  };
  CHECK_THAT(message_of("none.mp4"), ContainsSubstring("there is no file"));
  write_file(folder / "text.mp4", "video,start_frame\n");
  CHECK_THAT(message_of("text.mp4"), ContainsSubstring("truncated or no video"));
  write_file(folder / "empty.mp4", "");
  CHECK_THAT(message_of("empty.mp4"), ContainsSubstring("truncated or no video"));
  std::filesystem::create_directory(folder / "folder.mp4");
  CHECK_THAT(message_of("folder.mp4"), ContainsSubstring("is not a file"));

  for (const char* name : {"whole.mp4", "whole.mkv", "whole.avi"}) {
    CAPTURE(name);
    write_numbered(folder / name, 60, {.size = size});
    CHECK(message_of(name).empty());
    const std::string bytes = read_file(folder / name);
    const std::string cut = std::string("cut-") + name;
    write_file(folder / cut, bytes.substr(0, bytes.size() * 6 / 10));
    CHECK_FALSE(message_of(cut).empty());
  }

  write_numbered(folder / "a.ts", 30, {.size = size, .codec = "mpeg2video"});
  write_numbered(folder / "b.ts", 30, {.size = {96, 80}, .codec = "mpeg2video"});
  write_file(folder / "both.ts", read_file(folder / "a.ts") + read_file(folder / "b.ts"));
  CHECK_THAT(message_of("both.ts"), ContainsSubstring("changes its size from 64x64 to 96x80 at frame "));

  CHECK_THROWS_WITH(VideoWriter(folder / "x.mp4", {.size = {63, 63}, .codec = "libx264"}), ContainsSubstring("63x63"));
  CHECK_THROWS_WITH(VideoWriter(folder / "x.mp4", {.size = size, .codec = "h265x"}), ContainsSubstring("h265x"));
}

TEST_CASE("damage anywhere in a file is an error or harmless, never a crash", "[video]") {
  const Folder folder;
  const FrameSize size{64, 64};
  ddpkit::train::Random random(2);
  for (const char* name : {"a.mp4", "a.mkv", "a.avi"}) {
    write_numbered(folder / name, 40, {.size = size, .keyframe_interval = 8});
    const std::string whole = read_file(folder / name);
    int refused = 0;
    for (int round = 0; round < 60; ++round) {
      std::string bytes = whole;
      for (int i = 0; i < 1 + round % 8; ++i)
        bytes[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(bytes.size())))] ^=
            static_cast<char>(1 + random.below(255));
      if (round % 4 == 3) bytes.resize(static_cast<std::size_t>(random.below(static_cast<std::int64_t>(bytes.size()))));
      write_file(folder / "damaged", bytes);
      try {
        VideoReader reader(index_video(folder / "damaged"));
        std::vector<std::uint8_t> pixels(static_cast<std::size_t>(17 * size.pixels()));
        for (const std::int64_t first : {0, 20, 5}) reader.read(first, 17, size, pixels.data());
      } catch (const ddpkit::InvalidArgument&) {
        ++refused;
      }
    }
    CHECK(refused > 10);
  }
}
