// Tier 0 and FFmpeg's headers. Owning pointers to FFmpeg's objects, for the files that read and write videos.
#pragma once

extern "C" {
#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>
#include <libavutil/imgutils.h>
#include <libavutil/opt.h>
#include <libavutil/pixdesc.h>
#include <libswscale/swscale.h>
}

#include <memory>
#include <string>

namespace video {

/// Returns FFmpeg's text for an error code.
inline std::string describe_av_error(int code) {
  char text[AV_ERROR_MAX_STRING_SIZE] = {};
  av_strerror(code, text, sizeof text);
  return text;
}

struct AvDeleter {
  void operator()(AVCodecContext* context) const noexcept { avcodec_free_context(&context); }
  void operator()(AVFrame* frame) const noexcept { av_frame_free(&frame); }
  void operator()(AVPacket* packet) const noexcept { av_packet_free(&packet); }
  void operator()(SwsContext* context) const noexcept { sws_freeContext(context); }
};

template <class T>
using AvPointer = std::unique_ptr<T, AvDeleter>;

/// A file opened for reading.
struct AvInputDeleter {
  void operator()(AVFormatContext* context) const noexcept { avformat_close_input(&context); }
};
using AvInput = std::unique_ptr<AVFormatContext, AvInputDeleter>;

}  // namespace video
