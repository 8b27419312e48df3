#include "asr/features.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <random>

#include <fmt/format.h>

#include <ddpkit/error.h>

namespace asr {
namespace {

constexpr double kLowestHz = 20;
constexpr double kFloor = 1e-6;  // Added to the power in a band, so that digital silence has a logarithm.

double to_mel(double hz) { return 2595 * std::log10(1 + hz / 700); }
double to_hz(double mel) { return 700 * (std::pow(10, mel / 2595) - 1); }

at::Tensor mel_filters(int mels, std::int64_t fft, int sample_rate) {
  at::Tensor filters = torch::zeros({fft / 2 + 1, mels});
  auto weight = filters.accessor<float, 2>();
  const double lowest = to_mel(kLowestHz), highest = to_mel(sample_rate / 2.0);
  const auto edge = [&](int i) { return to_hz(lowest + (highest - lowest) * i / (mels + 1)); };
  for (int band = 0; band < mels; ++band) {
    const double left = edge(band), middle = edge(band + 1), right = edge(band + 2);
    double sum = 0;
    for (std::int64_t bin = 0; bin <= fft / 2; ++bin) {
      const double hz = static_cast<double>(bin) * sample_rate / static_cast<double>(fft);
      const double height = std::min((hz - left) / (middle - left), (right - hz) / (right - middle));
      weight[bin][band] = static_cast<float>(std::max(0.0, height));
      sum += weight[bin][band];
    }
    if (sum == 0)
      throw ddpkit::InvalidArgument(fmt::format(
          "features.mels: {} bands are too narrow for a window of {} samples at {} Hz: the one at {:.0f} Hz "
          "would be empty",
          mels, fft, sample_rate, middle));
  }
  return filters;
}

}  // namespace

LogMel::LogMel(const FeatureOptions& options)
    : options_(options),
      window_(std::llround(options.window_ms * options.sample_rate / 1000)),
      hop_(std::llround(options.hop_ms * options.sample_rate / 1000)),
      fft_(1) {
  if (hop_ < 1 || window_ < hop_)
    throw ddpkit::InvalidArgument(fmt::format("features: a window of {} ms every {} ms leaves sound out or is empty",
                                              options.window_ms, options.hop_ms));
  while (fft_ < window_) fft_ *= 2;
  // Low bands of a short window fall between two bins of its spectrum. A finer grid has bins for them.
  fft_ *= 2;
  hann_ = torch::hann_window(window_);
  filters_ = mel_filters(options.mels, fft_, options.sample_rate);
}

std::int64_t LogMel::frames(std::int64_t samples) const {
  return 1 + std::max<std::int64_t>(samples - window_, 0) / hop_;
}

at::Tensor LogMel::operator()(const std::vector<float>& samples) const {
  const torch::NoGradGuard no_grad;
  const std::int64_t count = static_cast<std::int64_t>(samples.size());
  at::Tensor wave = torch::zeros({std::max(count, window_)});
  std::copy(samples.begin(), samples.end(), wave.data_ptr<float>());
  const at::Tensor windows = wave.unfold(0, window_, hop_) * hann_;
  const at::Tensor spectrum = torch::fft::rfft(windows, fft_);
  const at::Tensor power = torch::real(spectrum * spectrum.conj());
  return torch::log(torch::matmul(power, filters_) + kFloor);
}

at::Tensor normalised(const at::Tensor& features) {
  const auto [variance, mean] = torch::var_mean(features, 0, /*unbiased=*/false, /*keepdim=*/true);
  return (features - mean) / (variance + 1e-5).sqrt();
}

RunningNormaliser::RunningNormaliser(const at::Tensor& mean, const at::Tensor& deviation, double frames)
    : sum_(mean.to(torch::kDouble) * frames),
      square_sum_((mean.to(torch::kDouble).square() + deviation.to(torch::kDouble).square()) * frames),
      count_(frames) {}

at::Tensor RunningNormaliser::operator()(const at::Tensor& features) {
  const at::Tensor wide = features.to(torch::kDouble);
  const at::Tensor counts = torch::arange(1, features.size(0) + 1, torch::kDouble).unsqueeze(1) + count_;
  const at::Tensor sums = wide.cumsum(0) + sum_;
  const at::Tensor squares = wide.square().cumsum(0) + square_sum_;
  const at::Tensor mean = sums / counts;
  const at::Tensor variance = (squares / counts - mean.square()).clamp_min(0);
  if (features.size(0) > 0) {
    sum_ = sums[-1].clone();
    square_sum_ = squares[-1].clone();
    count_ += static_cast<double>(features.size(0));
  }
  return ((wide - mean) / (variance + 1e-5).sqrt()).to(torch::kFloat);
}

at::Tensor spec_augment(const at::Tensor& features, const SpecAugmentOptions& options, std::uint64_t seed) {
  at::Tensor result = features.clone();
  std::mt19937_64 random(seed);
  // The distributions of the standard library differ between implementations.
  const auto below = [&random](std::int64_t end) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(end));
  };
  const auto mask = [&](int dim, std::int64_t widest) {
    const std::int64_t size = features.size(dim);
    const std::int64_t width = below(std::min(widest, size) + 1);
    const std::int64_t begin = below(size - width + 1);
    result.narrow(dim, begin, width).zero_();
  };
  const auto share = static_cast<std::int64_t>(options.time_share * static_cast<double>(features.size(0)));
  for (int i = 0; i < options.time_masks; ++i) mask(0, std::min<std::int64_t>(options.time_width, share));
  for (int i = 0; i < options.frequency_masks; ++i) mask(1, options.frequency_width);
  return result;
}

}  // namespace asr
