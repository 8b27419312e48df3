#include "video/video_writer.h"

#include <cstring>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "video/libav.h"

namespace video {
namespace {

const AVCodec* find_encoder(const std::string& name) {
  if (!name.empty()) return avcodec_find_encoder_by_name(name.c_str());
  const AVCodec* codec = avcodec_find_encoder_by_name("libx264");
  return codec ? codec : avcodec_find_encoder(AV_CODEC_ID_MPEG4);
}

AVPixelFormat first_format(const AVCodec* codec) {
#if LIBAVCODEC_VERSION_INT >= AV_VERSION_INT(61, 13, 100)
  const void* formats = nullptr;
  avcodec_get_supported_config(nullptr, codec, AV_CODEC_CONFIG_PIX_FORMAT, 0, &formats, nullptr);
  const auto* const first = static_cast<const AVPixelFormat*>(formats);
#else
  const AVPixelFormat* const first = codec->pix_fmts;
#endif
  for (const AVPixelFormat* format = first; format && *format != AV_PIX_FMT_NONE; ++format) {
    if (*format == AV_PIX_FMT_YUV420P) return *format;
  }
  return first ? first[0] : AV_PIX_FMT_YUV420P;
}

}  // namespace

class VideoWriter::Impl {
 public:
  Impl(const std::filesystem::path& path, const VideoWriterOptions& options) : path_(path), options_(options) {
    av_log_set_level(AV_LOG_QUIET);
    const AVCodec* codec = find_encoder(options.codec);
    if (!codec) throw ddpkit::InvalidArgument(fmt::format("FFmpeg has no encoder {} here", options.codec));
    AVFormatContext* output = nullptr;
    check(avformat_alloc_output_context2(&output, nullptr, nullptr, path.c_str()), "make");
    output_.reset(output);
    // No version numbers in the file: the same frames give the same bytes.
    output->flags |= AVFMT_FLAG_BITEXACT;
    encoder_.reset(avcodec_alloc_context3(codec));
    AVCodecContext& encoder = *encoder_;
    encoder.width = options.size.width;
    encoder.height = options.size.height;
    encoder.pix_fmt = first_format(codec);
    encoder.time_base = {1, options.frames_per_second};
    encoder.framerate = {options.frames_per_second, 1};
    encoder.gop_size = options.keyframe_interval;
    encoder.thread_count = 1;
    encoder.strict_std_compliance = FF_COMPLIANCE_UNOFFICIAL;  // Permits Motion JPEG in the limited range.
    encoder.flags |= AV_CODEC_FLAG_BITEXACT;
    if (output->oformat->flags & AVFMT_GLOBALHEADER) encoder.flags |= AV_CODEC_FLAG_GLOBAL_HEADER;
    if (codec->id == AV_CODEC_ID_H264) {
      av_opt_set(encoder.priv_data, "preset", "veryfast", 0);
      av_opt_set(encoder.priv_data, "crf", "20", 0);
    } else {
      encoder.flags |= AV_CODEC_FLAG_QSCALE;
      encoder.global_quality = 3 * FF_QP2LAMBDA;
    }
    if (const int code = avcodec_open2(&encoder, codec, nullptr); code < 0)
      throw ddpkit::InvalidArgument(fmt::format("{} does not encode frames of {}x{} ({})", codec->name,
                                                options.size.width, options.size.height, describe_av_error(code)));
    stream_ = avformat_new_stream(output, nullptr);
    stream_->time_base = encoder.time_base;
    stream_->avg_frame_rate = encoder.framerate;
    check(avcodec_parameters_from_context(stream_->codecpar, &encoder), "make");
    check(avio_open(&output->pb, ("file:" + path.string()).c_str(), AVIO_FLAG_WRITE), "make");
    check(avformat_write_header(output, nullptr), "make");
    frame_.reset(av_frame_alloc());
    packet_.reset(av_packet_alloc());
    frame_->width = encoder.width;
    frame_->height = encoder.height;
    frame_->format = encoder.pix_fmt;
    check(av_frame_get_buffer(frame_.get(), 0), "make");
  }

  void write(const std::uint8_t* pixels) {
    check(av_frame_make_writable(frame_.get()), "write");
    const FrameSize size = options_.size;
    for (int row = 0; row < size.height; ++row)
      std::memcpy(frame_->data[0] + std::int64_t{row} * frame_->linesize[0], pixels + std::int64_t{row} * size.width,
                  static_cast<std::size_t>(size.width));
    for (int plane = 1; plane < 3 && frame_->data[plane]; ++plane)
      std::memset(frame_->data[plane], 128,
                  static_cast<std::size_t>(frame_->linesize[plane]) * static_cast<std::size_t>((size.height + 1) / 2));
    frame_->pts = next_++;
    encode(frame_.get());
  }

  void finish() {
    encode(nullptr);
    check(av_write_trailer(output_.get()), "write");
    check(avio_closep(&output_->pb), "write");
  }

 private:
  struct Closer {
    void operator()(AVFormatContext* context) const noexcept {
      if (context->pb) avio_closep(&context->pb);
      avformat_free_context(context);
    }
  };

  void check(int code, const char* what) const {
    if (code < 0) throw ddpkit::Error(fmt::format("cannot {} {}: {}", what, path_.string(), describe_av_error(code)));
  }

  void encode(const AVFrame* frame) {
    check(avcodec_send_frame(encoder_.get(), frame), "write");
    while (true) {
      const int code = avcodec_receive_packet(encoder_.get(), packet_.get());
      if (code == AVERROR(EAGAIN) || code == AVERROR_EOF) return;
      check(code, "write");
      packet_->duration = 1;
      av_packet_rescale_ts(packet_.get(), encoder_->time_base, stream_->time_base);
      packet_->stream_index = stream_->index;
      check(av_interleaved_write_frame(output_.get(), packet_.get()), "write");
    }
  }

  std::filesystem::path path_;
  VideoWriterOptions options_;
  std::unique_ptr<AVFormatContext, Closer> output_;
  AvPointer<AVCodecContext> encoder_;
  AVStream* stream_ = nullptr;
  AvPointer<AVFrame> frame_;
  AvPointer<AVPacket> packet_;
  std::int64_t next_ = 0;
};

VideoWriter::VideoWriter(const std::filesystem::path& path, const VideoWriterOptions& options)
    : impl_(std::make_unique<Impl>(path, options)) {}
VideoWriter::~VideoWriter() = default;
void VideoWriter::write(const std::uint8_t* pixels) { impl_->write(pixels); }
void VideoWriter::finish() { impl_->finish(); }

}  // namespace video
