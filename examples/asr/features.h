// Tier 1: ATen/core/Tensor.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace asr {

struct FeatureOptions {
  int sample_rate = 16'000;  ///< Hz; recordings at another rate are resampled.
  double window_ms = 25;
  double hop_ms = 10;
  int mels = 80;  ///< Bands per frame.
};

/// Log-mel spectra: Hann windows, power spectrum, triangular bands evenly spaced on the mel scale (HTK's formula) from
/// 20 Hz to half the sampling rate, natural logarithm. A frame needs only samples up to the end of its window, so sound
/// can be streamed. Thread-safe.
class LogMel {
 public:
  /// Throws InvalidArgument for a window shorter than its hop, or bands narrower than the resolution of the spectrum.
  explicit LogMel(const FeatureOptions& options);

  /// Returns the number of frames of `samples`, at least one. A recording shorter than one frame is padded with
  /// silence.
  std::int64_t frames(std::int64_t samples) const;
  /// Takes `samples` at the options' rate. Returns [frames, mels] float32.
  at::Tensor operator()(const std::vector<float>& samples) const;

  std::int64_t window() const noexcept { return window_; }  ///< Samples.
  std::int64_t hop() const noexcept { return hop_; }        ///< Samples.
  const FeatureOptions& options() const noexcept { return options_; }

 private:
  FeatureOptions options_;
  std::int64_t window_, hop_, fft_;
  at::Tensor hann_;     ///< [window]
  at::Tensor filters_;  ///< [fft / 2 + 1, mels]
};

/// Normalises each band to mean 0 and variance 1 over the utterance. `features` [frames, mels].
at::Tensor normalised(const at::Tensor& features);

/// Mean and standard deviation of each band, for the normalisation of streamed sound. Starts with the statistics of the
/// training set and adds the frames received.
class RunningNormaliser {
 public:
  /// `mean`, `deviation` [mels]; they count as `frames` frames.
  RunningNormaliser(const at::Tensor& mean, const at::Tensor& deviation, double frames = 100);
  /// Normalises the next frames [frames, mels], each with the statistics up to it.
  at::Tensor operator()(const at::Tensor& features);

 private:
  at::Tensor sum_, square_sum_;  ///< [mels], float64.
  double count_;
};

/// SpecAugment without time warping: Park and others 2019, arXiv 1904.08779.
struct SpecAugmentOptions {
  int time_masks = 2;
  int time_width = 10;      ///< Frames; a mask is 0 to `time_width` wide.
  double time_share = 0.2;  ///< Limits the width to this share of the utterance.
  int frequency_masks = 2;
  int frequency_width = 8;  ///< Bands.
};

/// Returns a copy of normalised features [frames, mels] with masks set to 0, their mean. The same seed gives the same
/// masks.
at::Tensor spec_augment(const at::Tensor& features, const SpecAugmentOptions& options, std::uint64_t seed);

}  // namespace asr
