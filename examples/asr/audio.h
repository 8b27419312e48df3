// Tier 0: the standard library only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include <ddpkit/error.h>

namespace asr {

/// A recording that cannot be read whole; the message begins with its path.
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

/// What a file's header says.
struct AudioInfo {
  std::int64_t samples = 0;  ///< Of each channel, in the segment.
  int sample_rate = 0;       ///< Hz.

  double seconds() const { return static_cast<double>(samples) / sample_rate; }
};

/// Looks at a file's header: anything that libsndfile reads (WAV, FLAC, ...). Throws AudioError for a file that is
/// missing, no recording or empty, for a WAV that is shorter than its header says, and for a segment that reaches
/// beyond the recording by more than 0.05 s, which may be its rounding.
AudioInfo audio_info(const std::filesystem::path& file, const Segment& segment = {});

/// A recording as one channel (the mean of what channels it has) at `sample_rate` Hz, in -1 .. 1, resampled by
/// libsamplerate where it was another. Throws AudioError as audio_info() does, and for one that ends early or holds
/// NaN.
std::vector<float> read_audio(const std::filesystem::path& file, int sample_rate, const Segment& segment = {});

}  // namespace asr
