#include "video/video_index.h"

#include <algorithm>
#include <system_error>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "video/open_video.h"

namespace video {

AvInput open_video(const std::filesystem::path& path) {
  // Disables FFmpeg's output on stderr: errors are thrown.
  av_log_set_level(AV_LOG_QUIET);
  std::error_code error;
  if (!std::filesystem::exists(path, error))
    throw ddpkit::InvalidArgument(fmt::format("there is no file {}", path.string()));
  if (!std::filesystem::is_regular_file(path, error))
    throw ddpkit::InvalidArgument(fmt::format("{} is not a file", path.string()));
  AVFormatContext* context = nullptr;
  // With the protocol "file:", because a file may have a name such as "concat:x".
  const int code = avformat_open_input(&context, ("file:" + path.string()).c_str(), nullptr, nullptr);
  if (code < 0)
    throw ddpkit::InvalidArgument(
        fmt::format("{}: is truncated or no video ({})", path.string(), describe_av_error(code)));
  AvInput input(context);
  if (const int found = avformat_find_stream_info(context, nullptr); found < 0)
    throw ddpkit::InvalidArgument(fmt::format("{}: {}", path.string(), describe_av_error(found)));
  return input;
}

std::shared_ptr<const VideoIndex> index_video(const std::filesystem::path& path) {
  const AvInput input = open_video(path);
  auto index = std::make_shared<VideoIndex>();
  index->path = path;
  index->stream = av_find_best_stream(input.get(), AVMEDIA_TYPE_VIDEO, -1, -1, nullptr, 0);
  if (index->stream < 0) throw ddpkit::InvalidArgument(fmt::format("{}: holds no video stream", path.string()));
  const AVCodecParameters& codec = *input->streams[index->stream]->codecpar;
  index->width = codec.width;
  index->height = codec.height;
  constexpr int kLargest = 16384;
  if (codec.width < 1 || codec.height < 1 || codec.width > kLargest || codec.height > kLargest)
    throw ddpkit::InvalidArgument(fmt::format("{}: frames of {}x{}: width and height must be 1 to {}", path.string(),
                                              codec.width, codec.height, kLargest));
  struct Packet {
    std::int64_t time;
    bool key;
  };
  std::vector<Packet> packets;
  const AvPointer<AVPacket> packet(av_packet_alloc());
  while (av_read_frame(input.get(), packet.get()) >= 0) {
    if (packet->stream_index == index->stream && packet->size > 0 && (packet->flags & AV_PKT_FLAG_DISCARD) == 0) {
      if (packet->pts == AV_NOPTS_VALUE) index->seekable = false;
      packets.push_back({packet->pts, (packet->flags & AV_PKT_FLAG_KEY) != 0});
    }
    av_packet_unref(packet.get());
  }
  std::sort(packets.begin(), packets.end(), [](const Packet& a, const Packet& b) { return a.time < b.time; });
  for (std::size_t i = 0; i < packets.size(); ++i) {
    if (i > 0 && packets[i].time == packets[i - 1].time) index->seekable = false;
    index->times.push_back(packets[i].time);
    if (packets[i].key) index->keyframes.push_back(static_cast<std::int64_t>(i));
  }
  if (packets.empty()) throw ddpkit::InvalidArgument(fmt::format("{}: is truncated: it holds no frame", path.string()));
  return index;
}

}  // namespace video
