// Tier 2: torch/nn/module.h.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace asr {

struct ModelOptions {
  std::int64_t mels = 80;
  std::int64_t labels = 29;                    ///< The blank among them.
  std::int64_t width = 512;                    ///< Of every layer.
  std::int64_t kernel = 5;                     ///< Frames that a convolution sees.
  std::vector<std::int64_t> strides = {2, 2};  ///< A convolution each.
  bool batch_norm = false;                     ///< After each convolution.
  std::int64_t layers = 6;                     ///< LMU layers.
  std::int64_t memory_channels = 40;
  std::int64_t order = 32;
  double theta = 64;  ///< Steps that a memory reaches back, after the convolutions.
  double dropout = 0.1;
};

/// What Recognizer::stream() keeps between calls.
struct StreamState {
  std::vector<at::Tensor> inputs;    ///< That the next frames of a convolution still need. [convolution]
  std::vector<at::Tensor> memories;  ///< [layer]
};

/// Log-mel frames in, CTC logits out: causal convolutions over time, then LMU layers with layer normalisation before
/// and a shortcut around each, then a linear layer. No step sees a later frame, so frames behind an utterance's end,
/// which fill up a batch, change nothing before it, and sound can be transcribed while it is spoken.
class Recognizer : public torch::nn::Cloneable<Recognizer> {
 public:
  /// Weights drawn from torch's default generator: seed it first.
  explicit Recognizer(const ModelOptions& options);
  void reset() override;

  /// `features` [batch, frames, mels]; returns [batch, output_frames(frames), labels] float32. While training, `noise`
  /// [batch, layers, width], uniform in 0 .. 1, says what dropout drops: a feature of a layer in all of an utterance's
  /// frames at once (Gal and Ghahramani 2016, arXiv 1512.05287). It comes from outside so that it belongs to the
  /// utterance, whichever rank that is on.
  at::Tensor forward(const at::Tensor& features, const at::Tensor& noise = {});

  /// The next frames [frames, mels] of one utterance through the recurrent form; returns [those that are ready,
  /// labels].
  at::Tensor stream(const at::Tensor& features, StreamState& state);

  std::int64_t output_frames(std::int64_t frames) const;
  const ModelOptions& options() const noexcept { return options_; }

  /// Of the training set's log-mel features, for sound that has not ended yet. [mels]
  at::Tensor feature_mean, feature_deviation;

 private:
  at::Tensor convolve(std::size_t index, const at::Tensor& input);

  ModelOptions options_;
  torch::nn::ModuleList convolutions_, batch_norms_, layer_norms_, layers_;
  torch::nn::LayerNorm last_norm_{nullptr};
  torch::nn::Linear head_{nullptr};
};

}  // namespace asr
