#include "video/video_reader.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include <ddpkit/error.h>

#include "video/open_video.h"

namespace video {
namespace {

// Returns whether the frame's first plane is its luma, one byte per pixel.
bool has_plain_luma(AVPixelFormat format) {
  const AVPixFmtDescriptor* description = av_pix_fmt_desc_get(format);
  if (!description || (description->flags & (AV_PIX_FMT_FLAG_RGB | AV_PIX_FMT_FLAG_PAL | AV_PIX_FMT_FLAG_HWACCEL |
                                             AV_PIX_FMT_FLAG_BITSTREAM)) != 0)
    return false;
  const AVComponentDescriptor& luma = description->comp[0];
  return luma.plane == 0 && luma.step == 1 && luma.offset == 0 && luma.depth == 8 && luma.shift == 0;
}

}  // namespace

class VideoReader::Impl {
 public:
  explicit Impl(std::shared_ptr<const VideoIndex> index)
      : index_(std::move(index)),
        input_(open_video(index_->path)),
        packet_(av_packet_alloc()),
        frame_(av_frame_alloc()) {
    if (index_->stream >= static_cast<int>(input_->nb_streams)) fail("has changed since it was looked at");
    open_decoder();
  }

  void read(std::int64_t first, std::int64_t count, FrameSize size, std::uint8_t* pixels) {
    if (first < 0 || count < 1 || first + count > index_->frames())
      fail(fmt::format("has {} frames, not {} to {}", index_->frames(), first, first + count - 1));
    try {
      // Seeking in some containers is approximate and may end after the keyframe. Then decodes from the beginning.
      if (decode(first, count, size, pixels, /*seek=*/true) || decode(first, count, size, pixels, /*seek=*/false))
        return;
      fail(fmt::format("frame {} to {} cannot all be decoded: the file is damaged or truncated", first,
                       first + count - 1));
    } catch (...) {
      position_ = -1;
      throw;
    }
  }

  const VideoIndex& index() const noexcept { return *index_; }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw ddpkit::InvalidArgument(fmt::format("{}: {}", index_->path.string(), what));
  }

  void open_decoder() {
    const AVStream* stream = input_->streams[index_->stream];
    const AVCodec* codec = avcodec_find_decoder(stream->codecpar->codec_id);
    if (!codec)
      fail(fmt::format("FFmpeg has no decoder for its codec {}", avcodec_get_name(stream->codecpar->codec_id)));
    decoder_.reset(avcodec_alloc_context3(codec));
    int code = avcodec_parameters_to_context(decoder_.get(), stream->codecpar);
    decoder_->pkt_timebase = stream->time_base;
    decoder_->thread_count = 1;
    // Damage is an error; by default FFmpeg would conceal it.
    decoder_->err_recognition = AV_EF_EXPLODE;
    decoder_->error_concealment = 0;
    if (code >= 0) code = avcodec_open2(decoder_.get(), codec, nullptr);
    if (code < 0) fail(describe_av_error(code));
    for (unsigned other = 0; other < input_->nb_streams; ++other) {
      if (static_cast<int>(other) != index_->stream) input_->streams[other]->discard = AVDISCARD_ALL;
    }
  }

  // Returns false if a frame is missing.
  bool decode(std::int64_t first, std::int64_t count, FrameSize size, std::uint8_t* pixels, bool seek) {
    go_to(first, seek && index_->seekable);
    for (std::int64_t wanted = first; wanted < first + count;) {
      const std::int64_t got = next_frame(first);
      if (got < 0 || got > wanted) {
        position_ = -1;
        return false;
      }
      if (got < wanted) continue;
      write_frame(size, pixels + (wanted - first) * size.pixels());
      ++wanted;
    }
    return true;
  }

  // After this, next_frame() returns all frames from `first`.
  void go_to(std::int64_t first, bool seek) {
    const auto behind = std::upper_bound(index_->keyframes.begin(), index_->keyframes.end(), first);
    const std::int64_t keyframe = !seek || behind == index_->keyframes.begin() ? 0 : *std::prev(behind);
    if (position_ >= keyframe && position_ <= first) return;
    avcodec_flush_buffers(decoder_.get());
    drained_ = false;
    clean_from_ = keyframe > 0 ? index_->times[static_cast<std::size_t>(keyframe)] : AV_NOPTS_VALUE;
    int code = 0;
    if (keyframe > 0) {
      code = av_seek_frame(input_.get(), index_->stream, clean_from_, AVSEEK_FLAG_BACKWARD);
    } else if (read_) {
      code = avformat_seek_file(input_.get(), -1, INT64_MIN, 0, INT64_MAX, 0);
      if (code < 0) code = av_seek_frame(input_.get(), -1, 0, AVSEEK_FLAG_BYTE);
    }
    if (code < 0) fail(fmt::format("cannot be sought in ({})", describe_av_error(code)));
    position_ = keyframe;
    read_ = true;
  }

  // Returns the number of the frame in frame_; -1 at the end. May skip frames before `first`.
  std::int64_t next_frame(std::int64_t first) {
    while (true) {
      const int code = avcodec_receive_frame(decoder_.get(), frame_.get());
      if (code == AVERROR(EAGAIN) && !drained_) {
        send_packet(first);
        continue;
      }
      if (code == AVERROR_EOF || code == AVERROR(EAGAIN)) return -1;
      if (code < 0) fail(fmt::format("frame {} cannot be decoded ({})", position_, describe_av_error(code)));
      const std::int64_t number = number_of_frame();
      if (number < 0) continue;  // Before the keyframe, or a time that no packet has.
      if ((frame_->flags & AV_FRAME_FLAG_CORRUPT) != 0 || frame_->decode_error_flags != 0) {
        if (number < first) continue;
        fail(fmt::format("frame {} is damaged", number));
      }
      position_ = number + 1;
      return number;
    }
  }

  std::int64_t number_of_frame() const {
    if (!index_->seekable) return position_;
    const std::int64_t time = frame_->pts != AV_NOPTS_VALUE ? frame_->pts : frame_->best_effort_timestamp;
    const auto found = std::lower_bound(index_->times.begin(), index_->times.end(), time);
    return found == index_->times.end() || *found != time ? -1 : found - index_->times.begin();
  }

  void send_packet(std::int64_t first) {
    int code = 0;
    do {
      av_packet_unref(packet_.get());
      code = av_read_frame(input_.get(), packet_.get());
    } while (code >= 0 && packet_->stream_index != index_->stream);
    if (code < 0) {  // The end of the file, or of a truncated file: drains the decoder.
      avcodec_send_packet(decoder_.get(), nullptr);
      drained_ = true;
      return;
    }
    const std::int64_t time = packet_->pts;
    const bool before = index_->seekable && time < index_->times[static_cast<std::size_t>(first)];
    // No other frame refers to these frames.
    decoder_->skip_frame = before ? AVDISCARD_NONREF : AVDISCARD_DEFAULT;
    code = avcodec_send_packet(decoder_.get(), packet_.get());
    av_packet_unref(packet_.get());
    // After a keyframe, frames may follow that are shown before the keyframe and refer to missing frames.
    const bool leads = clean_from_ != AV_NOPTS_VALUE && time < clean_from_;
    if (code < 0 && code != AVERROR_EOF && !leads)
      fail(fmt::format("cannot be decoded near frame {} ({})", std::max<std::int64_t>(position_, 0),
                       describe_av_error(code)));
  }

  void write_frame(FrameSize size, std::uint8_t* pixels) {
    const AVFrame& frame = *frame_;
    if (frame.width != index_->width || frame.height != index_->height)
      fail(fmt::format("changes its size from {}x{} to {}x{} at frame {}", index_->width, index_->height, frame.width,
                       frame.height, position_ - 1));
    auto format = static_cast<AVPixelFormat>(frame.format);
    if (has_plain_luma(format)) {
      format = AV_PIX_FMT_GRAY8;
      if (size == FrameSize{frame.width, frame.height}) {
        for (int row = 0; row < size.height; ++row)
          std::memcpy(pixels + std::int64_t{row} * size.width, frame.data[0] + std::int64_t{row} * frame.linesize[0],
                      static_cast<std::size_t>(size.width));
        return;
      }
    }
    if (!scaler_ || format != scaled_from_ || size != scaled_to_) {
      scaler_.reset(sws_getContext(frame.width, frame.height, format, size.width, size.height, AV_PIX_FMT_GRAY8,
                                   SWS_AREA, nullptr, nullptr, nullptr));
      if (!scaler_)
        fail(fmt::format("swscale cannot make {}x{} in grey of {}x{} in {}", size.width, size.height, frame.width,
                         frame.height, av_get_pix_fmt_name(format) ? av_get_pix_fmt_name(format) : "?"));
      scaled_from_ = format;
      scaled_to_ = size;
      // swscale writes whole vectors, so the rows need space for them.
      stride_ = (size.width + 63) / 64 * 64;
      scaled_.resize(static_cast<std::size_t>(stride_) * static_cast<std::size_t>(size.height) + 64);
    }
    std::uint8_t* const to[4] = {scaled_.data(), nullptr, nullptr, nullptr};
    const int strides[4] = {stride_, 0, 0, 0};
    if (sws_scale(scaler_.get(), frame.data, frame.linesize, 0, frame.height, to, strides) != size.height)
      fail(fmt::format("frame {} could not be scaled", position_ - 1));
    for (int row = 0; row < size.height; ++row)
      std::memcpy(pixels + std::int64_t{row} * size.width, scaled_.data() + std::int64_t{row} * stride_,
                  static_cast<std::size_t>(size.width));
  }

  std::shared_ptr<const VideoIndex> index_;
  AvInput input_;
  AvPointer<AVCodecContext> decoder_;
  AvPointer<AVPacket> packet_;
  AvPointer<AVFrame> frame_;
  AvPointer<SwsContext> scaler_;
  AVPixelFormat scaled_from_ = AV_PIX_FMT_NONE;
  FrameSize scaled_to_;
  int stride_ = 0;
  std::vector<std::uint8_t> scaled_;
  std::int64_t position_ = -1;  // The decoder's next frame is this one or later. -1: seek to a keyframe first.
  std::int64_t clean_from_ = AV_NOPTS_VALUE;  // Time of the keyframe of the last seek.
  bool drained_ = false;
  bool read_ = false;  // Packets have been read since the file was opened.
};

VideoReader::VideoReader(std::shared_ptr<const VideoIndex> index) : impl_(std::make_unique<Impl>(std::move(index))) {}
VideoReader::~VideoReader() = default;
void VideoReader::read(std::int64_t first, std::int64_t count, FrameSize size, std::uint8_t* pixels) {
  impl_->read(first, count, size, pixels);
}
const VideoIndex& VideoReader::index() const noexcept { return impl_->index(); }

}  // namespace video
