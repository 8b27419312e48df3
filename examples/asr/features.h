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
  int mels = 80;  ///< Bands of a frame.
};

/// Log-mel spectra: Hann windows, power spectrum, triangular bands even on the mel scale (HTK's formula) from 20 Hz to
/// half the sampling rate, natural logarithm. A frame needs only samples up to its window's end, so that sound can be
/// taken as it comes. Safe to call from several threads.
class LogMel {
 public:
  /// Throws InvalidArgument for a window that is shorter than its hop, or bands narrower than the spectrum can tell.
  explicit LogMel(const FeatureOptions& options);

  /// Frames of that many samples: at least one, for which a shorter recording is filled up with silence.
  std::int64_t frames(std::int64_t samples) const;
  /// `samples` at the options' rate; returns [frames, mels] float32.
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

/// Each band with mean 0 and variance 1 over the utterance. `features` [frames, mels].
at::Tensor normalised(const at::Tensor& features);

/// Mean and standard deviation of each band, which sound that has not ended yet is normalised by: those of the training
/// set to begin with, then more and more of what has been heard.
class RunningNormaliser {
 public:
  /// `mean`, `deviation` [mels]; they count as `frames` frames.
  RunningNormaliser(const at::Tensor& mean, const at::Tensor& deviation, double frames = 100);
  /// The next frames [frames, mels], each by what has been heard up to it.
  at::Tensor operator()(const at::Tensor& features);

 private:
  at::Tensor sum_, square_sum_;  ///< [mels], float64.
  double count_;
};

/// SpecAugment without time warping: Park and others 2019, arXiv 1904.08779.
struct SpecAugmentOptions {
  int time_masks = 2;
  int time_width = 10;      ///< Frames; a mask is 0 to so many wide.
  double time_share = 0.2;  ///< And no wider than this share of the utterance.
  int frequency_masks = 2;
  int frequency_width = 8;  ///< Bands.
};

/// A copy of normalised features [frames, mels] with masks set to 0, their mean. Same seed, same masks.
at::Tensor spec_augment(const at::Tensor& features, const SpecAugmentOptions& options, std::uint64_t seed);

}  // namespace asr
