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
  std::int64_t labels = 29;                    ///< Including the blank.
  std::int64_t width = 512;                    ///< Width of each layer.
  std::int64_t kernel = 5;                     ///< Kernel size of a convolution, in frames.
  std::vector<std::int64_t> strides = {2, 2};  ///< One convolution per stride.
  bool batch_norm = false;                     ///< Adds batch norm after each convolution.
  std::int64_t layers = 6;                     ///< Number of LMU layers.
  std::int64_t memory_channels = 40;
  std::int64_t order = 32;
  double theta = 64;  ///< Length of the memory, in steps after the convolutions.
  double dropout = 0.1;
};

/// The state of Recognizer::stream() between calls.
struct StreamState {
  std::vector<at::Tensor> inputs;    ///< Inputs that the next frames of a convolution need. [convolution]
  std::vector<at::Tensor> memories;  ///< [layer]
};

/// Maps log-mel frames to CTC logits: causal convolutions over time, then LMU layers with layer normalisation before
/// and a shortcut around each, then a linear layer. No step depends on a later frame. So padding after an utterance's
/// end does not change its outputs, and sound can be transcribed as a stream.
class Recognizer : public torch::nn::Cloneable<Recognizer> {
 public:
  /// Draws the weights from torch's default generator: seed the generator first.
  explicit Recognizer(const ModelOptions& options);
  void reset() override;

  /// `features` [batch, frames, mels]; returns [batch, output_frames(frames), labels] float32. While training, `noise`
  /// [batch, layers, width], uniform in 0 .. 1, selects what dropout drops: a feature of a layer in all frames of an
  /// utterance (Gal and Ghahramani 2016, arXiv 1512.05287). `noise` is an argument so that it depends on the utterance
  /// and not on the rank.
  at::Tensor forward(const at::Tensor& features, const at::Tensor& noise = {});

  /// Processes the next frames [frames, mels] of one utterance with the recurrent form. Returns the complete steps:
  /// [steps, labels].
  at::Tensor stream(const at::Tensor& features, StreamState& state);

  std::int64_t output_frames(std::int64_t frames) const;
  const ModelOptions& options() const noexcept { return options_; }

  /// Statistics of the training set's log-mel features, for streamed sound. [mels]
  at::Tensor feature_mean, feature_deviation;

 private:
  at::Tensor convolve(std::size_t index, const at::Tensor& input);

  ModelOptions options_;
  torch::nn::ModuleList convolutions_, batch_norms_, layer_norms_, layers_;
  torch::nn::LayerNorm last_norm_{nullptr};
  torch::nn::Linear head_{nullptr};
};

}  // namespace asr
