// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include <ddpkit/error.h>

namespace asr {

/// A recording that cannot be read completely. The message begins with its path.
class AudioError : public ddpkit::InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

/// A part of a recording, in seconds.
struct Segment {
  double offset = 0;
  double duration = 0;  ///< 0: to the end.

  bool is_whole() const { return offset == 0 && duration == 0; }
};

/// The contents of a file's header.
struct AudioInfo {
  std::int64_t samples = 0;  ///< Per channel, in the segment.
  int sample_rate = 0;       ///< Hz.

  double seconds() const { return static_cast<double>(samples) / sample_rate; }
};

/// Reads the header of a file in any format of libsndfile (WAV, FLAC, ...). Throws AudioError for a file that is
/// missing, empty or not a recording, and for a WAV that is shorter than its header specifies. Also throws for a
/// segment that ends more than 0.05 s after the recording; a smaller excess may be rounding.
AudioInfo audio_info(const std::filesystem::path& file, const Segment& segment = {});

/// Reads a recording as one channel (the mean of its channels) at `sample_rate` Hz, in -1 .. 1. libsamplerate resamples
/// other rates. Throws AudioError as audio_info() does, and for a recording that ends early or holds NaN.
std::vector<float> read_audio(const std::filesystem::path& file, int sample_rate, const Segment& segment = {});

}  // namespace asr
